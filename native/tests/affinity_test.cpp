// Affinities: what a list may say, that the process's own mask bounds it, and that a refusal names the field.
#include "affinity.h"

#include <sched.h>

#include <string>
#include <vector>

#include "check.h"
#include "tinyloop/errors.h"

using namespace tinyloop;

namespace {

using Cpus = std::vector<int>;

template <class F>
bool refused(F f) {
    try {
        f();
    } catch (const Error& error) {
        return error.kind == ErrorKind::config && error.field == "affinity";
    }
    return false;
}

}  // namespace

int main() {
    const Cpus allowed = allowed_cpus();
    CHECK(!allowed.empty());
    const int first = allowed.front();
    const std::string name = std::to_string(first);
    CHECK(affinity_cpus("none").empty() && affinity_cpus("auto") == allowed && affinity_cpus(name) == Cpus{first});
    CHECK(affinity_cpus(name + "-" + name) == Cpus{first});
    if (allowed.size() > 1) {
        const std::string other = std::to_string(allowed[1]);
        CHECK((affinity_cpus(other + "," + name) == Cpus{allowed[1], first}));  // in the order given
    }
    for (const std::string bad : {"", ",", "x", "-1", "1-", "all", "99999999999", "5-2", "1023-1024"})
        CHECK(refused([&] { affinity_cpus(bad); }));
    CHECK(refused([&] { affinity_cpus(name + "," + name); }) && refused([&] { affinity_cpus(name + ","); }) &&
          refused([&] { affinity_cpus(name + " "); }));

    const int count = static_cast<int>(allowed.size());
    CHECK(cpu_per_thread("none", 1).empty() && cpu_per_thread("auto", count) == allowed);
    CHECK(cpu_per_thread("auto", 1) == Cpus{first} && cpu_per_thread("auto", count + 1).empty());  // plain sharing
    CHECK(cpu_per_thread(name, 1) == Cpus{first} && refused([&] { cpu_per_thread(name, 2); }));

    // As under taskset or in a container: what the mask leaves out is not ours.
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(first), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(allowed_cpus() == Cpus{first} && affinity_cpus("auto") == Cpus{first});
    for (const int cpu : allowed)
        if (cpu != first) CHECK(refused([&] { affinity_cpus(std::to_string(cpu)); }));
    return finish();
}
