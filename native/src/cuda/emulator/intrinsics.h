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

struct alignas(8) float2 {
    float x, y;
};
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

namespace tinyloop::gpu::emulator {

// gpu.h, Copies: done when the thread waits for them, and until then NaN. It lies here so that the race detector sees
// what it writes.
class Copies {
  public:
    void add(void* to, const void* from, int count) {
        if (reinterpret_cast<uintptr_t>(to) % 16 || (count && reinterpret_cast<uintptr_t>(from) % 16))
            fail("a copy of 16 bytes from or to an address that is no multiple of 16");
        if (end_ - begin_ == kMost) fail("more copies at a time than the emulator keeps");
        one_[end_++ % kMost] = {static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), count / 4};
        for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(to)[i] = ~0u;
    }
    void close_group() {
        before_last_ = last_;
        last_ = end_;
    }
    void wait(int left) {
        const unsigned until = left == 0 ? last_ : before_last_;
        if (left > 1) fail("waiting with more than one group left is not emulated");
        for (; begin_ != until; ++begin_) {
            const Copy& copy = one_[begin_ % kMost];
            for (int i = 0; i < 4; ++i) copy.to[i] = i < copy.words ? copy.from[i] : 0;
        }
    }

  private:
    static constexpr unsigned kMost = 64;
    struct Copy {
        uint32_t* to;
        const uint32_t* from;
        int words;
    };
    Copy one_[kMost];
    unsigned begin_ = 0, end_ = 0, last_ = 0, before_last_ = 0;  // all copies ever added are numbered
};

}  // namespace tinyloop::gpu::emulator
