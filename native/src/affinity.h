// Which processors an engine's threads run on. Only the mask of this process is asked, which a container, a service
// manager or taskset may have narrowed; nothing is pinned here.
#pragma once
#include <string>
#include <vector>

namespace tinyloop {

// The processors this process may use, in ascending order.
std::vector<int> allowed_cpus();

// The processors that an affinity names: "none" none; "auto" the process's own; or a list such as "0,2-5". Throws
// Error(config) naming `affinity`.
std::vector<int> affinity_cpus(const std::string& affinity);

// One of them for each thread; none where "auto" finds too few. Throws Error(config) where a list is too short.
std::vector<int> cpu_per_thread(const std::string& affinity, int threads);

}  // namespace tinyloop
