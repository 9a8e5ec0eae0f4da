// What kernels are written in: CUDA C++, or the same names on the CPU (emulator/). Every kernel file includes this and
// nothing else of CUDA. Rules that let one source serve both: kernels are started by launch() with one argument, all
// shared memory is dynamic, and what has no C++ spelling stands in one function with two bodies, here.
//
// Multiply-adds are written as fmaf and the compilers may fuse nothing by themselves (-fmad=false, -ffp-contract=off):
// two instances of a kernel would otherwise round differently.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define TL_DYNAMIC_SHARED(T, name)                                  \
    extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
    T* name = reinterpret_cast<T*>(dynamic_shared)
#else
#include "cpu/kernels.h"
#include "emulator/intrinsics.h"
#endif

#include "device.h"

namespace tinyloop::gpu {

constexpr size_t kSharedUnasked = 48 << 10;  // bytes of shared memory that a block gets without asking

// Starts `kernel` on the device's stream, or records it while a graph is being captured.
template <class Arguments>
void launch(Device& device, dim3 grid, unsigned threads, size_t shared_bytes, void (*kernel)(Arguments),
            const Arguments& arguments) {
#if defined(__CUDACC__)
    if (shared_bytes > kSharedUnasked)
        device.check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
                     "asking for shared memory");
    Arguments copy = arguments;
    void* pointers[] = {&copy};
    device.check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), pointers, shared_bytes,
                                  static_cast<cudaStream_t>(device.stream())),
                 "starting a kernel");
#else
    device.submit([=] { emulator::run(grid, threads, shared_bytes, [&] { kernel(arguments); }); });
#endif
}

__device__ __forceinline__ float half_to_float(uint16_t bits) {
#if defined(__CUDACC__)
    return __half2float(__ushort_as_half(bits));
#else
    return cpu::half_to_float(bits);
#endif
}

// Nearest even, clamped to the finite range; NaN becomes the lowest number.
__device__ __forceinline__ uint16_t float_to_half(float value) {
#if defined(__CUDACC__)
    value = value > -65504.0f ? value : -65504.0f;
    value = value < 65504.0f ? value : 65504.0f;
    return __half_as_ushort(__float2half_rn(value));
#else
    return cpu::float_to_half(value);
#endif
}

// The nearest number of tf32 (8 bits of exponent, 10 of fraction), of two the one farther from zero.
__device__ __forceinline__ float to_tf32(float value) {
#if defined(__CUDACC__)
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return __uint_as_float(bits);
#else
    return emulator::to_tf32(value);
#endif
}

// sums += a * b on the tensor cores: 16 x 8 times 8 x 8, all numbers of tf32, summed in fp32. All lanes of a warp call
// it together, each with its part of the matrices: PTX ISA, "Matrix Fragments for mma.m16n8k8". With g = lane / 4 and
// t = lane % 4 these are a(g, t), a(g + 8, t), a(g, t + 4), a(g + 8, t + 4); b(t, g), b(t + 4, g); and of the sums
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void multiply_add(float (&sums)[4], const float (&a)[4], float b0, float b1) {
#if defined(__CUDACC__)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
#else
    emulator::multiply_add(sums, a, b0, b1);
#endif
}

// Copies to shared memory that go on while the thread computes, 16 bytes each, in groups; a thread sees what it copied
// once it has waited, the others after a barrier as well.
class Copies {
  public:
    // Both addresses are multiples of 16; the first `count` bytes come from there, the rest become zero.
    __device__ __forceinline__ void add(void* to, const void* from, int count) {
#if defined(__CUDACC__)
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
            "l"(from), "r"(count)
            : "memory");
#else
        copies_.add(to, from, count);
#endif
    }
    __device__ __forceinline__ void close_group() {
#if defined(__CUDACC__)
        asm volatile("cp.async.commit_group;" ::: "memory");
#else
        copies_.close_group();
#endif
    }
    // Until at most the last kLeft groups are still on their way.
    template <int kLeft>
    __device__ __forceinline__ void wait() {
#if defined(__CUDACC__)
        asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#else
        copies_.wait(kLeft);
#endif
    }

  private:
#if !defined(__CUDACC__)
    emulator::Copies copies_;
#endif
};

// Whether the calling block is the last of `blocks` that come here; that one sees what the others wrote before, and
// finds the counter at 0 again. All threads of the block call it; `flag` lies in shared memory.
__device__ __forceinline__ bool last_to_arrive(int* counter, int blocks, int* flag) {
    __syncthreads();
    if (threadIdx.x == 0) {
#if defined(__CUDACC__)
        __threadfence();
        *flag = atomicAdd(counter, 1) == blocks - 1;
        if (*flag) *counter = 0;
        __threadfence();
#else
        *flag = emulator::arrive(counter, blocks);
#endif
    }
    __syncthreads();
    return *flag != 0;
}

}  // namespace tinyloop::gpu
