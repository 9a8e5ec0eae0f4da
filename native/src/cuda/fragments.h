// Products on the tensor cores, and the one order in which all of them sum.
//
// The cores multiply numbers of tf32, which has the 11 significant bits of fp16 and the range of fp32. A weight of fp16
// or bf16 is such a number; an input is cut in two of them that add up to it, but for a rounding like fp32's own, and
// each times the weight is exact. A weight of fp32 is cut too, and what its low part times an input's low part would
// add, 2^-24 of the whole, is left out.
//
// The order: the inputs are cut into kSlices slices of equal length, a multiple of kDepth. A slice is summed from its
// first kDepth inputs to its last: in four steps, the products with the inputs' high parts, then with their low parts,
// then those of the weights' low parts. The slices' sums are added from the first to the last. That depends on the
// number of inputs alone: rows are columns of one operand, and no column of a product sees another.
#pragma once
#include "numbers.h"

namespace tinyloop::gpu {

constexpr int kTileOutputs = 16, kTileRows = 8;  // of one instruction
constexpr int kDepth = 32;                       // inputs for which a lane reads 16 bytes of weights
constexpr int kSlices = 8;

struct Slices {
    int inputs;  // of each but the last
    int count;   // that are not empty
};
__device__ __forceinline__ Slices slices_of(int inputs) {
    const int tiles = (inputs + kDepth - 1) / kDepth, of_slice = (tiles + kSlices - 1) / kSlices;
    return {of_slice * kDepth, (tiles + of_slice - 1) / of_slice};
}

// Eight weights of one output as they lie in memory.
template <int kDtype>
struct Eight {
    static constexpr int kParts = kDtype == TL_F32 ? 2 : 1;
    uint4 part[kParts];

    __device__ __forceinline__ void load(const char* from) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) part[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kParts; ++i) part[i] = {0, 0, 0, 0};
    }
    __device__ __forceinline__ float at(int i) const {
        if constexpr (kDtype == TL_F32) {
            const unsigned words[4] = {part[i / 4].x, part[i / 4].y, part[i / 4].z, part[i / 4].w};
            return __uint_as_float(words[i % 4]);
        } else {
            const unsigned words[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
            const unsigned word = words[i / 2];
            if constexpr (kDtype == TL_BF16) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
            return half_to_float(static_cast<uint16_t>(i % 2 ? word >> 16 : word));
        }
    }
};

struct Cut {
    float high, low;
};
__device__ __forceinline__ Cut cut(float x) {
    const float high = to_tf32(x);
    return {high, fabsf(high) < INFINITY ? to_tf32(x - high) : 0.0f};  // an infinite one stays infinite
}

// sums += two of a lane's inputs, k and k + 1, times their weights.
template <int kDtype, int kRowTiles>
__device__ __forceinline__ void multiply_step(float (&sums)[kRowTiles][4], const Eight<kDtype>& upper,
                                              const Eight<kDtype>& lower, int k, const Cut (&x)[kRowTiles][2]) {
    float w[4] = {upper.at(k), lower.at(k), upper.at(k + 1), lower.at(k + 1)}, rest[4];
    if constexpr (kDtype == TL_F32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Cut both = cut(w[i]);
            w[i] = both.high;
            rest[i] = both.low;
        }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) multiply_add(sums[r], w, x[r][0].high, x[r][1].high);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) multiply_add(sums[r], w, x[r][0].low, x[r][1].low);
    if constexpr (kDtype == TL_F32) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) multiply_add(sums[r], rest, x[r][0].high, x[r][1].high);
    }
}

// sums += kDepth inputs of kRowTiles tiles of rows times their weights for kOutputTiles tiles of outputs. Lane l has
// the inputs and weights 8 * (l % 4) .. + 7: the weights of outputs l / 4 and l / 4 + 8 of each tile; `inputs` points
// to those of row l / 4, in shared memory; each next tile of rows lies `apart` floats further.
template <int kDtype, int kOutputTiles, int kRowTiles>
__device__ __forceinline__ void multiply_tiles(float (&sums)[kOutputTiles][kRowTiles][4],
                                               const Eight<kDtype> (&weights)[kOutputTiles][2], const float* inputs,
                                               int apart) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        Cut x[kRowTiles][2];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const float2 two = *reinterpret_cast<const float2*>(inputs + r * apart + k);
            x[r][0] = cut(two.x);
            x[r][1] = cut(two.y);
        }
#pragma unroll
        for (int o = 0; o < kOutputTiles; ++o)
            multiply_step<kDtype, kRowTiles>(sums[o], weights[o][0], weights[o][1], k, x);
    }
}

}  // namespace tinyloop::gpu
