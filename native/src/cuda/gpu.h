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

// Starts `kernel` on the device's stream, or records it while a graph is being captured.
template <class Arguments>
void launch(Device& device, dim3 grid, unsigned threads, size_t shared_bytes, void (*kernel)(Arguments),
            const Arguments& arguments) {
#if defined(__CUDACC__)
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
