// What the thread team costs: a barrier, a call, and a call after the team has parked.
//   scripts/cpp-tests; cmake --build build/native --target pool_bench; build/native/pool_bench [threads]
#include "cpu/pool.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using tinyloop::cpu::Pool;
using Clock = std::chrono::steady_clock;

namespace {

double us_since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
    Pool pool(threads);
    constexpr int kBarriers = 20000;
    std::vector<double> barrier, call, woken;
    for (int round = 0; round < 21; ++round) {
        Clock::time_point start = Clock::now();
        pool.run([&](int) {
            for (int i = 0; i < kBarriers; ++i) pool.barrier();
        });
        barrier.push_back(us_since(start) / kBarriers);
        start = Clock::now();
        for (int i = 0; i < 1000; ++i) pool.run([](int) {});
        call.push_back(us_since(start) / 1000);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        start = Clock::now();
        pool.run([](int) {});
        woken.push_back(us_since(start));
    }
    std::printf("%d threads, us, medians of 21: barrier %.3f, call %.3f, call after parking %.1f\n", threads,
                median(barrier), median(call), median(woken));
}
