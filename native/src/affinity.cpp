#include "affinity.h"

#include <sched.h>

#include <algorithm>
#include <charconv>

#include "tinyloop/errors.h"

namespace tinyloop {
namespace {

std::string list_of(const std::vector<int>& cpus) {
    std::string text;
    for (const int cpu : cpus) text += (text.empty() ? "" : ",") + std::to_string(cpu);
    return text;
}

// Reads a number at `at` and moves it on; -1: there is none.
int number(const char*& at, const char* end) {
    int value = -1;
    const auto read = std::from_chars(at, end, value);
    if (read.ec != std::errc() || value < 0 || value >= CPU_SETSIZE) return -1;
    at = read.ptr;
    return value;
}

}  // namespace

std::vector<int> allowed_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    std::vector<int> cpus;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return {0};
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    return cpus;
}

std::vector<int> affinity_cpus(const std::string& affinity) {
    if (affinity == "none") return {};
    const std::vector<int> allowed = allowed_cpus();
    if (affinity == "auto") return allowed;
    const std::string accepted =
        "none, auto, or a list such as 0,2-5 without repeats, of the processors of this process: " + list_of(allowed);
    std::vector<int> cpus;
    const char *at = affinity.data(), *end = at + affinity.size();
    while (true) {
        const int first = number(at, end);
        int last = first;
        if (at < end && *at == '-') last = number(++at, end);
        if (first < 0 || last < first) refuse(ErrorKind::config, "affinity", affinity, accepted);
        for (int cpu = first; cpu <= last; ++cpu) {
            const bool ours = std::binary_search(allowed.begin(), allowed.end(), cpu);
            if (!ours || std::find(cpus.begin(), cpus.end(), cpu) != cpus.end())
                refuse(ErrorKind::config, "affinity", affinity, accepted);
            cpus.push_back(cpu);
        }
        if (at == end) return cpus;
        if (*at++ != ',') refuse(ErrorKind::config, "affinity", affinity, accepted);
    }
}

std::vector<int> cpu_per_thread(const std::string& affinity, int threads) {
    std::vector<int> cpus = affinity_cpus(affinity);
    if (static_cast<size_t>(threads) <= cpus.size()) {
        cpus.resize(static_cast<size_t>(threads));
        return cpus;
    }
    if (affinity != "none" && affinity != "auto")
        refuse(ErrorKind::config, "affinity", affinity,
               "a processor for each of " + std::to_string(threads) + " threads");
    return {};
}

}  // namespace tinyloop
