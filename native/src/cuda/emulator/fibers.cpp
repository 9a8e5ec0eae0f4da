#include "emulator/fibers.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "the emulator switches stacks with x86-64 instructions: build without TINYLOOP_EMULATED on this machine"
#endif

namespace tinyloop::gpu::emulator {

Fibers fibers;

namespace {

Fibers::Body first_body;

// Saves the registers that a call must keep on this stack, and goes on where `to` was left.
__attribute__((naked, noinline)) void switch_stack(void** /*from*/, void* /*to*/) {
    asm volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

}  // namespace

void fiber_started() {
    fibers.go_on(nullptr);
    first_body();
    __builtin_unreachable();
}

Fibers::~Fibers() {
    if (stacks_) ::munmap(stacks_, count_ * kStack);
}

void Fibers::prepare(unsigned count) {
    if (count <= count_) return;
    if (stacks_) ::munmap(stacks_, count_ * kStack);
    count_ = 0;
    void* memory =
        ::mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks_ = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
    if (!stacks_) throw std::bad_alloc();
    count_ = count;
    tops_.resize(count);
}

void Fibers::begin(unsigned fiber, Body body) {
    first_body = body;
    char* stack = stacks_ + fiber * kStack;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(stack, kStack);  // frames of its last life were never left
#endif
    // Stacks that begin at the same place of a page would all use the same few lines of the processor's cache.
    auto* top = reinterpret_cast<uint64_t*>(stack + kStack - fiber * 576 % (16 << 10));
    *--top = 0;  // the stack as a call leaves it
    *--top = reinterpret_cast<uint64_t>(&fiber_started);
    for (int i = 0; i < 6; ++i) *--top = 0;
    tops_[fiber] = top;
}

void Fibers::go_on([[maybe_unused]] void* fake) {
#if defined(__SANITIZE_ADDRESS__)
    if (from_scheduler_)
        __sanitizer_finish_switch_fiber(fake, &scheduler_stack_, &scheduler_size_);
    else
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void Fibers::enter(unsigned fiber) {
    running_ = fiber;
    from_scheduler_ = true;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stacks_ + fiber * kStack, kStack);
    switch_stack(&scheduler_, tops_[fiber]);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    switch_stack(&scheduler_, tops_[fiber]);
#endif
}

// Both ends of the switch stand in this one function, so that the processor foresees where its return leads.
void Fibers::pass(unsigned to, [[maybe_unused]] bool for_good) {
    void** from = &tops_[running_];
    void* fake = nullptr;
    running_ = to;
    from_scheduler_ = false;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, stacks_ + to * kStack, kStack);
#endif
    switch_stack(from, tops_[to]);
    go_on(fake);
}

void Fibers::leave([[maybe_unused]] bool for_good) {
    void* fake = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, scheduler_stack_, scheduler_size_);
#endif
    switch_stack(&tops_[running_], scheduler_);
    go_on(fake);
}

bool Fibers::holds(const void* address) const {
    const char* p = static_cast<const char*>(address);
    return p >= stacks_ && p < stacks_ + count_ * kStack;
}

}  // namespace tinyloop::gpu::emulator
