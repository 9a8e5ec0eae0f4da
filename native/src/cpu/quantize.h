// Symmetric quantisation of stored inputs. Compiled once for all SIMD levels, so the stored bits are the same.
// Quantisation never mixes positions.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace tinyloop::cpu {

// A stored input ("store-h"): n elements, then for int8 and int4 one fp16 scale per group of 32.
enum class Stored { fp16, int8, int4 };
size_t stored_bytes(Stored kind, int n);
void store(Stored kind, const float* x, int n, uint8_t* out);
void restore(Stored kind, const uint8_t* in, int n, float* x);  // x: padded to 32 floats

}  // namespace tinyloop::cpu
