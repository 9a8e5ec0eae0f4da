// The part of CUDA C++ that the kernels use, for a C++ compiler: each CUDA thread is a fiber (emulator.h), and what
// threads do together (barriers, shuffles) is a call of the scheduler.
#pragma once
#include <cmath>

#include "emulator/emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (::tinyloop::gpu::emulator::current.thread)
#define blockIdx (::tinyloop::gpu::emulator::current.block)
#define TL_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(::tinyloop::gpu::emulator::current.shared)
#define __syncthreads() ::tinyloop::gpu::emulator::block_barrier(__FILE__, __LINE__)
#define __syncwarp() ::tinyloop::gpu::emulator::warp_barrier(__FILE__, __LINE__)

using tinyloop::gpu::emulator::dim3;

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    static_assert(sizeof(T) == 4, "a 32-bit value");
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = tinyloop::gpu::emulator::shuffle_xor(mask, bits, lanes);
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffsll(unsigned long long bits) { return __builtin_ffsll(static_cast<long long>(bits)); }
