// Symmetric quantisation of one position's vectors. Compiled once for all SIMD levels, so the stored bits are the same.
// Quantisation never mixes positions.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace tinyloop::cpu {

// out[i * stride] = round(x[i] / scale), n elements; returns scale = max|x| / 127 (0 when all are 0).
float quantize_int8(const float* x, int n, int8_t* out, size_t stride);

// A stored input ("store-h"): n elements, then for int8 and int4 one fp16 scale per group of 32.
enum class Stored { fp16, int8, int4 };
size_t stored_bytes(Stored kind, int n);
void store(Stored kind, const float* x, int n, uint8_t* out);
void restore(Stored kind, const uint8_t* in, int n, float* x);  // x: padded to 32 floats

}  // namespace tinyloop::cpu
