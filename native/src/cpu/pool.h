// A persistent team of threads that runs one function together and meets at barriers inside it.
// Waiting has three stages. It spins for some microseconds: a barrier then costs about 0.1 us. Then it yields: where
// other teams share the processors, one of them runs, and its threads meet; a team that spun on while its partner waits
// for a processor would hold up both (measured: two models of two threads on two cores took 7 times the work's time).
// At last it parks in the kernel, so an idle model uses no CPU; waking costs 100 us where cores sleep.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tinyloop::cpu {

class Pool {
  public:
    // cpus: (threads) the processor each thread stays on, or null: any. The first one is the calling thread's, which is
    // not ours to move.
    explicit Pool(int threads, const int32_t* cpus = nullptr);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Calls work(id) for id 0..threads-1, id 0 on the calling thread; returns when all have returned. Not re-entrant.
    void run(const std::function<void(int)>& work);

    // Inside run: returns when every thread has arrived.
    void barrier();

    // Inside run, between two barriers: the next number of 0, 1, 2, ...; for work that is shared out dynamically.
    int next() { return ticket_.fetch_add(1, std::memory_order_relaxed); }
    // Inside run, by one thread between two barriers that no other thread calls next() between.
    void reset_next() { ticket_.store(0, std::memory_order_relaxed); }

  private:
    void worker(int id);
    void await_change(const std::atomic<uint32_t>& value, uint32_t old) const;

    const int threads_;
    const int spins_;
    alignas(64) std::atomic<uint32_t> generation_{0};  // grows with every run
    alignas(64) std::atomic<uint32_t> phase_{0};       // grows with every barrier
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> ticket_{0};
    const std::function<void(int)>* work_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> members_;
};

}  // namespace tinyloop::cpu
