// A product of a matrix with some rows: what is done to its inputs before, and to its outputs after. The kernels:
// few_rows.h, many_rows.h. Both sum as fragments.h says, so that a row gets the same bits from either.
#pragma once
#include "fragments.h"
#include "heads.h"

namespace tinyloop::gpu {

enum class Input {
    plain,     // rows of `from`
    residual,  // x with what is pending, normed
    pair,      // x, then e
    stored     // a slot of a cache that holds inputs
};
enum class Output {
    plain,  // rows of `to`
    gated,  // silu(gate) * up
    heads,  // queries to `to`; keys and values, or the input, to the caches
    kept,   // keys and values of stored inputs, to CacheView::projected
    logits
};

struct Product {
    Shape shape;
    Rows rows;
    List list;
    // The matrix: (outputs, inputs), rows of `stride` elements, padded with zeros to a multiple of 8.
    const void* weights;
    int inputs, stride;
    int outputs;  // gated: of the gate; as many of up follow
    // A block's outputs are `units` times `width` of them, each unit padded to `pitch`: heads, the gate's and up's part
    // (gated), or just some outputs.
    int units, width, pitch;

    Input input;
    const float* from;  // plain: (rows, from_width)
    int from_width;
    Residual residual;      // also of pair
    const float* e;         // pair: (rows, width)
    const float* norm;      // (width), or null
    float* resolved;        // residual: (rows, width), where x goes with what was pending; may be null
    const SlotTile* slots;  // stored
    float* prepared;        // (rows, prepared_width): where prepare() puts the inputs
    int prepared_width;

    Output output;
    float* to;
    int to_width;
    float scale;  // of logits
    Heads heads;
    Visits visits;

    __host__ __device__ int span() const { return units * pitch; }
};

// Output `o` of a block as a row of the matrix; -1: it is padding.
__device__ __forceinline__ int matrix_row(const Product& p, int o) {
    const int unit = o / p.pitch, i = o % p.pitch, block = static_cast<int>(blockIdx.y);
    const bool gated = p.output == Output::gated;
    const int number = (gated ? block : block * p.units + unit) * p.width + i;
    if (unit >= p.units || i >= p.width || number >= p.outputs) return -1;
    return gated ? unit * p.outputs + number : number;
}

// Where the weights of a row of the matrix lie; of padding, some that may be read.
template <int kDtype>
__device__ __forceinline__ const char* weights_of(const Product& p, int row) {
    const size_t at = static_cast<size_t>(row < 0 ? 0 : row) * p.stride;
    return static_cast<const char*>(p.weights) + at * (kDtype == TL_F32 ? 4 : 2);
}

}  // namespace tinyloop::gpu
