// Sums over the lanes of a warp and the threads of a block, each in one fixed order: a tree over the 32 lanes by
// halving distance, then the warps by number. The order does not depend on how many sums are taken at once.
#pragma once
#include "gpu.h"

namespace tinyloop::gpu {

#if defined(TINYLOOP_BLOCK_THREADS)  // the emulator's, for tests of tiny models: most threads of a real block would
                                     // idle
constexpr int kThreads = TINYLOOP_BLOCK_THREADS;
#else
constexpr int kThreads = 256;  // of a block; kernels that differ say so
#endif
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        const float other = __shfl_xor_sync(~0u, value, apart);
        value = other > value ? other : value;
    }
    return value;
}

// kCount sums over the warp at once (a power of two up to 32): lane l gets number l / (32 / kCount). While there are
// several left, a lane gives away half of its values for its partner's share of the other half: 31 shuffles for 32
// sums instead of 160.
template <int kCount, int kApart = 16>
__device__ __forceinline__ float warp_sums(float (&values)[kCount]) {
    if constexpr (kApart == 0) {
        return values[0];
    } else if constexpr (kCount == 1) {
        values[0] += __shfl_xor_sync(~0u, values[0], kApart);
        return warp_sums<1, kApart / 2>(values);
    } else {
        const bool upper = threadIdx.x & kApart;
        float mine[kCount / 2];
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const float keep = upper ? values[i + kCount / 2] : values[i];
            const float give = upper ? values[i] : values[i + kCount / 2];
            mine[i] = keep + __shfl_xor_sync(~0u, give, kApart);
        }
        return warp_sums<kCount / 2, kApart / 2>(mine);
    }
}

// kCount sums over the block; all threads get them. `room` is shared memory of kCount * kWarps floats.
template <int kCount>
__device__ __forceinline__ void block_sums(float (&values)[kCount], float* room) {
    constexpr int kShare = 32 / kCount;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float sum = warp_sums<kCount>(values);
    __syncthreads();  // what was read from the room before
    if (lane % kShare == 0) room[lane / kShare * kWarps + warp] = sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        values[i] = 0;
        for (int w = 0; w < kWarps; ++w) values[i] += room[i * kWarps + w];
    }
}

}  // namespace tinyloop::gpu
