#include "pool.h"

#include <pthread.h>
#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tinyloop::cpu {
namespace {

constexpr int kSpins = 200;    // 5 to 10 us: what the threads of an even share differ by
constexpr int kYields = 1000;  // 0.7 ms if nothing else wants the processor: longer than the host's work between calls

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

}  // namespace

Pool::Pool(int threads, const int32_t* cpus)
    : threads_(threads), spins_(threads <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 0) {
    for (int id = 1; id < threads; ++id) {
        members_.emplace_back([this, id] { worker(id); });
        if (!cpus) continue;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(static_cast<size_t>(cpus[id]), &set);
        // Fails only where the process has lost the processor since it was asked for; any other does as well.
        pthread_setaffinity_np(members_.back().native_handle(), sizeof set, &set);
    }
}

Pool::~Pool() {
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& member : members_) member.join();
}

void Pool::await_change(const std::atomic<uint32_t>& value, uint32_t old) const {
    for (int i = 0; i < spins_; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    for (int i = 0; i < kYields; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        sched_yield();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void Pool::run(const std::function<void(int)>& work) {
    if (threads_ == 1) {
        work(0);
        return;
    }
    work_ = &work;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work(0);
    barrier();
}

void Pool::worker(int id) {
    for (uint32_t seen = 0;; ++seen) {
        await_change(generation_, seen);
        if (stop_) return;
        (*work_)(id);
        barrier();
    }
}

void Pool::barrier() {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        phase_.notify_all();
    } else {
        await_change(phase_, phase);
    }
}

}  // namespace tinyloop::cpu
