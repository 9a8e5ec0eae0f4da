// The scheduler: which fiber runs next, and when those that wait may go on.
#include "emulator/emulator.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/controls.h"
#include "emulator/fibers.h"
#include "emulator/races.h"

namespace tinyloop::gpu::emulator {

Current current;

namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kMostShared = 99 << 10;  // of a block that asks for it, where there is least (sm_86)
constexpr size_t kGuard = 64;             // bytes after shared memory that nothing may write
constexpr char kGuardByte = '\xA5';

enum class Wait { nothing, block, warp, shuffle, multiply, done };

struct Thread {
    Wait wait;
    uint32_t value, result;
    int lanes;
    float* sums;            // of multiply_add: the thread's own
    float operands[4 + 2];  // its part of a, then of b
    const char* file;
    int line;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<unsigned> turn;        // these run now, one after another; `next` is the first that has not begun
    std::vector<unsigned> ready;       // these run in the turn after
    std::vector<unsigned> warp_waits;  // per warp: threads that wait in it
    size_t next;
    unsigned running, block_waits, done;
    uint64_t random;
    const std::function<void()>* kernel;
    std::string error;
};

std::mutex one_at_a_time;  // the fibers and what they see are the process's
Block block;
tinyloop_emulator_controls controls{TL_ORDER_FORWARD, 1, UINT64_MAX, 0, 0, 0, 0};

std::string where(const Thread& thread) { return std::string(thread.file) + ":" + std::to_string(thread.line); }

uint64_t draw() {  // xorshift64 (Marsaglia 2003)
    block.random ^= block.random << 13;
    block.random ^= block.random >> 7;
    return block.random ^= block.random << 17;
}

template <class T>
void arrange(std::vector<T>& list) {
    if (controls.order == TL_ORDER_REVERSE) std::reverse(list.begin(), list.end());
    if (controls.order == TL_ORDER_SHUFFLED)
        for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[draw() % i]);
}

void make_ready(unsigned thread) {
    block.threads[thread].wait = Wait::nothing;
    block.ready.push_back(thread);
}

// The running fiber stops: the next of the turn runs, or after the last the scheduler.
void stop(bool for_good) {
    if (block.next == block.turn.size() || !block.error.empty()) return fibers.leave(for_good);
    block.running = current.thread.x = block.turn[block.next++];
    fibers.pass(block.running, for_good);
}

void wait(Thread& self, Wait kind, const char* file, int line) {
    self.wait = kind;
    self.file = file;
    self.line = line;
}

void body() {
    (*block.kernel)();
    block.threads[block.running].wait = Wait::done;
    ++block.done;
    stop(true);
}

// All threads of the block stand at one barrier: they go on.
void release_block() {
    const Thread* first = nullptr;
    for (const Thread& thread : block.threads) {
        if (thread.wait != Wait::block) {
            block.error = "__syncthreads() is reached by only part of the block";
            return;
        }
        if (!first) first = &thread;
        if (thread.line != first->line || thread.file != first->file) {
            block.error = "divergent __syncthreads(): " + where(*first) + " and " + where(thread);
            return;
        }
    }
    races::block_met();
    block.block_waits = 0;
    for (unsigned i = 0; i < block.threads.size(); ++i) make_ready(i);
}

bool is_tf32(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (bits & 0x1FFF) == 0 || std::isnan(value);
}

// sums += a * b of a warp, in order of the inner index. A product of two numbers of tf32 is exact in fp32. Every row of
// b's columns stays by itself, as it does on the device.
void multiply(Thread* threads) {
    float a[16][8], b[8][8], sums[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const float* from = threads[lane].operands;
        for (int i = 0; i < 6; ++i)
            if (!is_tf32(from[i])) block.error = "multiply_add() of a number that is not one of tf32";
        for (int i = 0; i < 4; ++i) {
            a[g + i % 2 * 8][t + i / 2 * 4] = from[i];
            sums[g + i / 2 * 8][2 * t + i % 2] = threads[lane].sums[i];
        }
        b[t][g] = from[4];
        b[t + 4][g] = from[5];
    }
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 8; ++k)
            for (int n = 0; n < 8; ++n) sums[m][n] += a[m][k] * b[k][n];
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) threads[lane].sums[i] = sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

// All threads of a warp wait in it: they exchange their values and go on, the running one at once.
void release_warp(unsigned warp) {
    const unsigned base = warp * kWarp;
    const Thread& first = block.threads[base];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        Thread& thread = block.threads[base + lane];
        if (thread.wait != first.wait || thread.lanes != first.lanes || thread.line != first.line) {
            block.error = "divergent warp: " + where(first) + " and " + where(thread);
            return;
        }
        thread.result = block.threads[base + (lane ^ static_cast<unsigned>(first.lanes))].value;
    }
    if (first.wait == Wait::multiply) multiply(&block.threads[base]);
    if (first.wait == Wait::warp) races::warp_met(base);
    block.warp_waits[warp] = 0;
    for (unsigned thread = base; thread < base + kWarp; ++thread)
        if (thread == block.running)
            block.threads[thread].wait = Wait::nothing;
        else
            make_ready(thread);
}

// The running thread waits for its warp, where it has said what for; comes back when the warp has met.
void meet_warp(Thread& self, Wait kind, const char* file, int line) {
    wait(self, kind, file, line);
    const unsigned warp = block.running / kWarp;
    if (++block.warp_waits[warp] == kWarp) release_warp(warp);
    if (self.wait != Wait::nothing || !block.error.empty()) stop(false);
}

void run_block(size_t shared_bytes) {
    const unsigned count = static_cast<unsigned>(block.threads.size());
    std::memset(current.shared, 0xFF, shared_bytes);  // NaN
    std::memset(current.shared + shared_bytes, kGuardByte, kGuard);
    block.turn.clear();
    block.ready.clear();
    block.warp_waits.assign(count / kWarp, 0);
    block.block_waits = block.done = 0;
    races::block_begins(count, current.shared, shared_bytes);
    for (unsigned i = 0; i < count; ++i) {
        block.threads[i] = {};
        fibers.begin(i, body);
        make_ready(i);
    }
    while (block.done < count) {
        if (block.ready.empty() && block.block_waits) release_block();
        if (block.error.empty() && block.ready.empty())
            for (const Thread& thread : block.threads)
                if (thread.wait != Wait::done) block.error = "part of a warp waits for the rest at " + where(thread);
        if (!block.error.empty()) return;
        block.turn.swap(block.ready);
        block.ready.clear();
        arrange(block.turn);
        block.next = 1;
        block.running = current.thread.x = block.turn[0];
        fibers.enter(block.running);
        if (!block.error.empty()) return;
    }
    for (size_t i = 0; i < kGuard; ++i)
        if (current.shared[shared_bytes + i] != kGuardByte) block.error = "a write past the end of shared memory";
    if (block.error.empty()) block.error = races::found();
}

}  // namespace

void run(dim3 grid, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    if (!threads || threads > 1024 || threads % kWarp || !blocks || grid.y > 65535 || grid.z > 65535 ||
        shared_bytes > kMostShared)
        throw std::runtime_error("emulator: a launch that no device accepts");
    ++controls.launches;
    block.kernel = &kernel;
    block.threads.resize(threads);
    block.error.clear();
    block.random = controls.seed * 0x9E3779B97F4A7C15u | 1;
    fibers.prepare(threads);
    std::vector<char> shared(shared_bytes + kGuard + 128);
    current.shared = shared.data() + (128 - reinterpret_cast<uintptr_t>(shared.data()) % 128);
    std::vector<uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), uint64_t{0});
    arrange(order);
    races::launch_begins();
    for (uint64_t number : order) {
        current.block = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                         static_cast<unsigned>(number / grid.x / grid.y)};
        run_block(shared_bytes);
        if (!block.error.empty()) break;
    }
    races::launch_ends();
    if (!block.error.empty())
        throw std::runtime_error("emulator: " + block.error + " [block " + std::to_string(current.block.x) + "," +
                                 std::to_string(current.block.y) + "," + std::to_string(current.block.z) + "]");
}

void block_barrier(const char* file, int line) {
    wait(block.threads[block.running], Wait::block, file, line);
    ++block.block_waits;
    stop(false);
}
void warp_barrier(const char* file, int line) {
    Thread& self = block.threads[block.running];
    self.lanes = 0;
    meet_warp(self, Wait::warp, file, line);
}

uint32_t shuffle_xor(unsigned mask, uint32_t value, int lanes) {
    Thread& self = block.threads[block.running];
    if (mask != ~0u) block.error = "a shuffle among only part of a warp";
    self.value = value;
    self.lanes = lanes;
    meet_warp(self, Wait::shuffle, "a shuffle", lanes);
    return self.result;
}

float to_tf32(float value) {
    if (!std::isfinite(value)) return value;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = (bits + 0x1000) & ~0x1FFFu;
    std::memcpy(&value, &bits, 4);
    return value;
}

void multiply_add(float (&sums)[4], const float (&a)[4], float b0, float b1) {
    Thread& self = block.threads[block.running];
    self.sums = sums;
    std::copy(a, a + 4, self.operands);
    self.operands[4] = b0;
    self.operands[5] = b1;
    self.lanes = 0;
    meet_warp(self, Wait::multiply, "multiply_add", 0);
}

void fail(const char* what) { block.error = what; }

// Blocks run one after another, so that plain arithmetic is atomic.
bool arrive(int* counter, int blocks) {
    const bool last = ++*counter == blocks;
    if (last) *counter = 0;
    races::arrived(counter, last);
    return last;
}

}  // namespace tinyloop::gpu::emulator

extern "C" __attribute__((visibility("default"))) tinyloop_emulator_controls* tinyloop_emulator(void) {
    return &tinyloop::gpu::emulator::controls;
}
