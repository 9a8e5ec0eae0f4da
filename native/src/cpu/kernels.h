// The CPU kernels behind one table per SIMD level. All levels compute the same bits.
//
// How the bits stay the same: every output element has one accumulator that is summed in index order with fused
// multiply-add, and sums over a vector's elements use 16 fixed virtual lanes and one fixed tree. Nothing depends on how
// many rows, panels or threads there are, or how wide the registers are.
//
// Layout: a matrix (outputs, inputs) is stored in panels of 16 outputs, [outputs/16][inputs][16], the last panel padded
// with zeros. One layout serves one row and many. Attention's layouts are in spans.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "spans.h"

namespace tinyloop::cpu {

inline constexpr int kPanel = 16;
inline constexpr int kGroup = 32;  // inputs that share a scale, in int4 weights and in a stored input
inline constexpr int kGroupBytes = kGroup * kPanel / 2 + kPanel * 2;  // of a panel of int4 weights
inline constexpr int pad16(int n) { return (n + 15) & ~15; }
inline constexpr int pad32(int n) { return (n + 31) & ~31; }

// Beside tl_dtype: kInt8 is what an int8 cache holds. The other two are its integer weights.
inline constexpr int kInt8 = 3, kInt8Weights = 4, kInt4Weights = 5;

enum class Put { store, add };  // c = sum; c += sum

struct Panels {
    const void* data;       // first panel
    int dtype;              // tl_dtype
    int inputs;             // k: how many of the stored inputs are used; of integer weights all, a multiple of 32
    size_t panel_elements;  // distance between panels, in elements; in bytes for integer weights
    int panels = 0;         // how many there are, to know how far to fetch ahead
};

// The rows that a product reads: as floats, or for integer weights as int8 with a scale per group of 32 inputs.
struct Activations {
    const float* x;  // (rows, ldx)
    int ldx;
    const int8_t* q = nullptr;  // (rows, ldq): x = q * scale; inputs padded to 32 with zeros
    int ldq = 0;
    const float* scales = nullptr;  // (rows, ldg), one per group
    const int16_t* offsets =
        nullptr;  // (rows, ldg, 2): -8 times the sum of a group's q at k % 4 < 2, and of the others,
    int ldg = 0;  // which turns sums over nibbles 0..15 into sums over -8..7
};

struct Kernels {
    const char* name;

    // c[row(m)][panel * 16 + j] = sum_k a[m][k] * w[panel][k][j] (see Put), for m < n_rows, panels begin..end.
    // c: rows at stride ldc, row(m) = rows ? rows[m] : m. scratch: 16 * (n_rows + 256) floats.
    void (*product)(const Panels& w, const Activations& a, int n_rows, float* c, int ldc, const int32_t* rows, Put put,
                    int panel_begin, int panel_end, float* scratch);

    // y = x / sqrt(mean(x^2) + eps) * weight; n true elements, x and y padded with zeros to 16.
    void (*rmsnorm)(const float* x, const float* weight, float eps, int n, float* y);
    // y += x
    void (*add)(const float* x, int n, float* y);
    // gate = silu(gate) * up
    void (*swiglu)(float* gate, const float* up, int n);
    float (*dot)(const float* a, const float* b, int n);
    void (*scale)(float* x, int n, float factor);

    // n elements at stride `stride` (elements), clamped to the finite fp16 range, rounded to nearest even.
    void (*store_fp16)(const float* x, int n, uint16_t* out, size_t stride);
    // out[i] = round(x[i] / scale), n a multiple of 16; returns scale = max|x| / 127 (0 when all are 0).
    float (*store_int8)(const float* x, int n, int8_t* out);

    // Attention, see spans.h. A query rounded to 15 bits: q = out * step.
    void (*round_queries)(const float* q, int n, int16_t* out, float* step);
    // The rows' partial results of one span.
    void (*attend)(const Span& span, const AttendRows& rows);
    // Folds a partial result into a row's sum; folding starts at empty_partial.
    void (*fold)(const float* partial, int head_dim, float* sum);
    // out = the sum of values over the sum of weights.
    void (*finish_attention)(const float* sum, int head_dim, float* out);

    // n elements of a tl_dtype, exactly.
    void (*to_floats)(const void* from, int dtype, int n, float* to);
    // One row of Activations: n true elements of x, padded with zeros to 16; q is padded to 32.
    void (*quantize)(const float* x, int n, int8_t* q, float* scales, int16_t* offsets);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // nullptr where the build or the machine has no AVX2 + FMA + F16C
const Kernels* avx512_kernels();  // nullptr where the build or the machine has no AVX-512 F/BW/VL/DQ

// Exact conversions, for packing at load.
float half_to_float(uint16_t half);
uint16_t float_to_half(float value);  // round to nearest even, clamped to the finite range
inline float bfloat_to_float(uint16_t b) {
    uint32_t bits = uint32_t(b) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t float_to_bfloat(float value) {  // round to nearest even
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // stays a NaN
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace tinyloop::cpu
