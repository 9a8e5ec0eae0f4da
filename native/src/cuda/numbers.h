// Element types in device memory: weights read eight at a time, stored inputs with a scale per 32 elements.
#pragma once
#include "gpu.h"
#include "tinyloop/backend.h"

namespace tinyloop::gpu {

constexpr int kGroup = 32;  // elements that share a scale in a stored input

__host__ __device__ constexpr int padded(int n, int to) { return (n + to - 1) / to * to; }

// Eight elements of a row from k on, k a multiple of 8 and the row aligned to 16 bytes.
template <int kDtype>
__device__ __forceinline__ void load8(const void* row, size_t k, float (&out)[8]) {
    if constexpr (kDtype == TL_F32) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(row) + k);
        const float4 a = from[0], b = from[1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
        const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(row) + k);
        const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (kDtype == TL_BF16) {
                out[2 * i] = __uint_as_float(words[i] << 16);
                out[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
            } else {
                out[2 * i] = half_to_float(static_cast<uint16_t>(words[i]));
                out[2 * i + 1] = half_to_float(static_cast<uint16_t>(words[i] >> 16));
            }
        }
    }
}

// One element of a matrix row of any type.
__device__ __forceinline__ float element(const void* row, int dtype, size_t k) {
    if (dtype == TL_F32) return static_cast<const float*>(row)[k];
    const uint16_t raw = static_cast<const uint16_t*>(row)[k];
    return dtype == TL_F16 ? half_to_float(raw) : __uint_as_float(static_cast<unsigned>(raw) << 16);
}

// Nearest integer, ties to even, within -limit .. limit; NaN becomes -limit.
__device__ __forceinline__ int nearest(float x, float limit) {
    x = x > -limit ? x : -limit;
    x = x < limit ? x : limit;
    return static_cast<int>(rintf(x));
}

// A largest magnitude as a scale starts from it: finite.
__device__ __forceinline__ float finite(float magnitude) { return magnitude < 3e38f ? magnitude : 3e38f; }

// Bytes of one stored input: n elements padded to 32, then for int8 and int4 one fp16 scale per group.
__host__ __device__ constexpr size_t stored_bytes(int mode, int n) {
    const size_t all = static_cast<size_t>(padded(n, kGroup));
    return mode == TL_CACHE_H_FP16 ? all * 2 : (mode == TL_CACHE_H_INT8 ? all : all / 2) + all / kGroup * 2;
}

__device__ __forceinline__ float stored_element(int mode, const uint8_t* input, int n, int k) {
    if (mode == TL_CACHE_H_FP16) return half_to_float(reinterpret_cast<const uint16_t*>(input)[k]);
    const int all = padded(n, kGroup);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(input + (mode == TL_CACHE_H_INT8 ? all : all / 2));
    const int q = mode == TL_CACHE_H_INT8 ? static_cast<int8_t>(input[k]) : (input[k / 2] >> (k % 2 * 4) & 15) - 8;
    return static_cast<float>(q) * half_to_float(scales[k / kGroup]);
}

}  // namespace tinyloop::gpu
