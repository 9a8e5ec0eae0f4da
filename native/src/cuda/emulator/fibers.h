// Fibers: stacks of their own on one thread, switched in a few instructions. Knows no CUDA.
#pragma once
#include <cstddef>
#include <vector>

namespace tinyloop::gpu::emulator {

class Fibers {
  public:
    using Body = void (*)();
    ~Fibers();

    void prepare(unsigned count);           // at least so many stacks
    void begin(unsigned fiber, Body body);  // the body must not return
    void enter(unsigned fiber);             // from the scheduler; comes back at leave()
    void pass(unsigned to, bool for_good);  // from the fiber that runs, to another
    void leave(bool for_good);              // from the fiber that runs, to the scheduler
    bool holds(const void* address) const;  // whether it lies on a fiber's stack

  private:
    static constexpr size_t kStack = 64 << 10;
    void go_on(void* fake);  // a fiber runs again
    char* stacks_ = nullptr;
    unsigned count_ = 0;
    std::vector<void*> tops_;
    unsigned running_ = 0;
    void* scheduler_ = nullptr;
    bool from_scheduler_ = false;  // whom the fiber that runs was switched to from
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_size_ = 0;
    friend void fiber_started();
};

extern Fibers fibers;

}  // namespace tinyloop::gpu::emulator
