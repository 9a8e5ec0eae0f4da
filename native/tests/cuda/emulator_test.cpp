// The emulator detects what it says it does: every kernel here has a planted bug, or is the same kernel without it.
// Built twice: plain, and with the race detector (TINYLOOP_EMULATOR_RACES).
#include <cmath>
#include <cstdlib>
#include <string>

#include "check.h"
#include "cuda/emulator/controls.h"
#include "gpu.h"

extern "C" tinyloop_emulator_controls* tinyloop_emulator(void);

using namespace tinyloop::gpu;

namespace {

struct Planted {
    float* out;
    bool bug;
    int* counter;
};

// Neighbours exchange values through shared memory, across warps; the bug: no barrier between.
void no_barrier(const Planted a) {
    TL_DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (!a.bug) __syncthreads();
    a.out[threadIdx.x] = shared[(threadIdx.x + 1) % 128];
}

// A loop reads what its next turn writes; the bug: no barrier at its end.
void overwritten(const Planted a) {
    TL_DYNAMIC_SHARED(float, shared);
    float sum = 0;
    for (int turn = 0; turn < 4; ++turn) {
        if (threadIdx.x < 32) shared[threadIdx.x] = static_cast<float>(turn);
        __syncthreads();
        sum += shared[threadIdx.x * 7 % 32];
        if (!a.bug) __syncthreads();
    }
    a.out[threadIdx.x] = sum;
}

// Lanes of one warp exchange through shared memory; the bug: a shuffle orders nothing.
void no_warp_barrier(const Planted a) {
    TL_DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = static_cast<float>(threadIdx.x);
    const float one = __shfl_xor_sync(~0u, 1.0f, 1);
    if (!a.bug) __syncwarp();
    a.out[threadIdx.x] = shared[threadIdx.x ^ 1] + one;
}

// Two blocks write one word.
void two_blocks(const Planted a) {
    if (threadIdx.x == 0) a.out[a.bug ? 0 : blockIdx.x] = 1;
}

// The last block adds up what the others left; the bug: it does not find out that it is the last.
void last_block(const Planted a) {
    TL_DYNAMIC_SHARED(int, flag);
    if (threadIdx.x == 0) a.out[1 + blockIdx.x] = 1;
    const bool last = last_to_arrive(a.counter, 4, flag);
    if (threadIdx.x || !(a.bug ? blockIdx.x == 3 : last)) return;
    a.out[0] = 0;
    for (int i = 0; i < 4; ++i) a.out[0] += a.out[1 + i];
}

// Part of a block leaves before a barrier.
void part_of_a_block(const Planted a) {
    if (a.bug && threadIdx.x >= 40) return;
    __syncthreads();
    a.out[threadIdx.x] = 1;
}

// Part of a warp takes part in a shuffle.
void part_of_a_warp(const Planted a) {
    float one = 1;
    if (!a.bug || threadIdx.x % 32 < 10) one = __shfl_xor_sync(~0u, one, 1);
    a.out[threadIdx.x] = one;
}

// Threads meet at different barriers.
void two_barriers(const Planted a) {
    if (a.bug && threadIdx.x < 64)
        __syncthreads();
    else
        __syncthreads();
    a.out[threadIdx.x] = 1;
}

// One element too far in shared memory.
void past_the_end(const Planted a) {
    TL_DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x + (a.bug ? 1 : 0)] = 1;
    __syncthreads();
    a.out[threadIdx.x] = 1;
}

// Shared memory is read before anything was written.
void not_written(const Planted a) {
    TL_DYNAMIC_SHARED(float, shared);
    if (!a.bug) shared[threadIdx.x] = 1;
    a.out[threadIdx.x] = shared[threadIdx.x];
}

// What the emulator says of the kernel with and without its bug; "NaN" where that is how it shows.
std::string said(void (*kernel)(Planted), bool bug, unsigned blocks = 1) {
    std::string first;
    for (int order : {TL_ORDER_FORWARD, TL_ORDER_REVERSE, TL_ORDER_SHUFFLED}) {
        tinyloop_emulator()->order = order;
        float out[128] = {};
        int counter = 0;
        Device device(0);
        try {
            launch(device, dim3(blocks), kernel == no_warp_barrier ? 32 : 128, 512, kernel,
                   Planted{out, bug, &counter});
            for (float value : out)
                if (std::isnan(value)) first = "NaN";
        } catch (const std::runtime_error& error) {
            first = error.what();
        }
        if (!first.empty()) break;
    }
    return first;
}

void check(const char* name, void (*kernel)(Planted), const char* expected, unsigned blocks = 1) {
    const std::string with = said(kernel, true, blocks), without = said(kernel, false, blocks);
    if (with.find(expected) == std::string::npos || !without.empty())
        std::printf("%s: \"%s\", without the bug \"%s\"\n", name, with.c_str(), without.c_str());
    CHECK(with.find(expected) != std::string::npos);
    CHECK(without.empty());
}

}  // namespace

int main() {
#if defined(TINYLOOP_EMULATOR_RACES)
    check("no barrier", no_barrier, "in shared memory");
    check("overwritten", overwritten, "in shared memory");
    check("no warp barrier", no_warp_barrier, "in shared memory");
    check("two blocks", two_blocks, "race (write, write) in global memory", 4);
    check("last block", last_block, "in global memory", 4);
#else
    check("no barrier", no_barrier, "NaN");
    for (auto kernel : {overwritten, no_warp_barrier, two_blocks, last_block})  // their bugs need the detector
        CHECK(said(kernel, false, 4).empty());
#endif
    check("part of a block", part_of_a_block, "only part of the block");
    check("part of a warp", part_of_a_warp, "part of a warp waits");
    check("two barriers", two_barriers, "divergent __syncthreads()");
    check("past the end", past_the_end, "past the end of shared memory");
    check("not written", not_written, "NaN");
    return finish();
}
