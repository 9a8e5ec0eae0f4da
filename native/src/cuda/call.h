// What kernels read about a call and a model: plain structures in device memory or in a kernel's argument.
#pragma once
#include "numbers.h"

namespace tinyloop::gpu {

constexpr int kMostBest = 128;  // tokens, the first in rank, that a row may want

struct Shape {  // of a model
    int d_model, n_heads, n_kv_heads, head_dim, d_ffn, vocab_size;
    int width;    // floats from one row of d_model to the next
    int queries;  // query heads that share a key head
    int rope;     // tl_rope
    float eps;
};

// One lane's cache. Layer visits are numbered: prelude layers, coda layers, then (loop, core layer), so that a cache of
// more loops starts like one of fewer. Keys and values: [visit][plane][slot][head_dim], a plane per key head, then one
// per value head; int8 with a scale per slot in [visit][plane][slot]. Inputs ("h"): [visit][slot][stored_bytes].
struct CacheView {
    int mode, window, capacity;
    int planes;         // that a visit has: 2 * n_kv_heads, or 1 of inputs
    size_t slot_bytes;  // of one slot in a plane, or of one stored input
    uint8_t* data;
    float* scales;       // int8 only
    int32_t* positions;  // (capacity), "h" only
    float* projected;    // "h" only, in attention: [plane][projected_slots][head_dim], of one visit
    int projected_slots;

    __device__ bool holds_inputs() const { return mode >= TL_CACHE_H_FP16; }
    // With a window the slots are a ring.
    __device__ int at(int slot) const { return window ? slot % capacity : slot; }
    __device__ int first_seen(int slot) const { return window && slot >= window ? slot - window + 1 : 0; }
    __device__ size_t place(int visit, int plane, int slot) const {
        return (static_cast<size_t>(visit) * planes + plane) * capacity + at(slot);
    }
    __device__ uint8_t* key_or_value(int visit, int plane, int slot) const {
        return data + place(visit, plane, slot) * slot_bytes;
    }
    __device__ uint8_t* input(int visit, int slot) const {
        return data + (static_cast<size_t>(visit) * capacity + at(slot)) * slot_bytes;
    }
};

// The call's table, and what kernels change of it.
struct Rows {
    const tl_row* row;  // its `cache` counts the views
    const CacheView* cache;
    int32_t* loops_run;  // per row: where it stops looping; kernels lower it when the row settles early
    float* stayed;       // per row: the exit gate's probability of not having stopped yet
};

// The rows that run together. Entries below 0 are none: a graph's list is padded.
struct List {
    const int32_t* entries;
    int count;
    int step;  // of the core loop, or -1: all of them run

    // The row at `index`, or -1 where it does not run.
    __device__ int row(const Rows& rows, int index) const {
        if (index >= count || entries[index] < 0) return -1;
        const int row = entries[index];
        return step < 0 || rows.row[row].loop_begin + step < rows.loops_run[row] ? row : -1;
    }
};

struct Group {  // consecutive entries of a list that read the same keys: one cache, one loop
    int32_t first, count;
};

struct SlotTile {  // some stored slots, as many as a block takes rows
    int32_t cache, first, count;
    int32_t loop;  // at the core's first step
};

// Which visit of a cache a layer is at a row's loop.
struct Visits {
    int first, per_loop;
    __device__ int of(const tl_row& row, int step) const {
        return first + (step < 0 ? 0 : row.loop_begin + step) * per_loop;
    }
};

// x as the kernels before left it: what is still to be taken in. A product's output cannot be added in place, because
// other blocks read x meanwhile; so the next kernel does it, and its first blocks write the sum down.
enum Pending { kNothing, kAdd, kAddNormed, kAddThenNorm, kReplace };
struct Residual {
    int kind;             // Pending
    const float* x;       // (rows, width)
    const float* out;     // (rows, width), to be taken in
    const float* weight;  // (width), of the norm of out (kAddNormed) or of the sum (kAddThenNorm)

    // factor: of that norm (norm_factor).
    __device__ float at(size_t i, int k, float factor) const {
        switch (kind) {
            case kAdd:
                return x[i] + out[i];
            case kAddNormed:
                return x[i] + out[i] * factor * weight[k];
            case kAddThenNorm:
                return (x[i] + out[i]) * factor * weight[k];
            case kReplace:
                return out[i];
            default:
                return x[i];
        }
    }
    __device__ bool has_norm() const { return kind == kAddNormed || kind == kAddThenNorm; }
    __device__ float normed_part(size_t i) const { return kind == kAddNormed ? out[i] : x[i] + out[i]; }
};

__device__ __forceinline__ float norm_factor(float squares, const Shape& shape) {
    return 1.0f / sqrtf(squares / static_cast<float>(shape.d_model) + shape.eps);
}

}  // namespace tinyloop::gpu
