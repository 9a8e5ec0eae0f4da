// The product of a matrix with some rows, and everything that is done to its inputs before and its outputs after.
//
// A block takes kRows rows and `span` outputs. Its input rows are made in shared memory, a chunk of the inputs at a
// time; each warp then takes four outputs at once, its lanes eight inputs each, 256 inputs apart. So an output is
// summed per lane in index order and then over the lanes in one tree, whatever kRows and the chunk are: one row alone
// gets the bits that it gets among many.
#pragma once
#include "call.h"
#include "heads.h"
#include "reduce.h"

namespace tinyloop::gpu {

constexpr int kOutputsAtOnce = 4;
constexpr int kSpan = kOutputsAtOnce * kWarps;  // outputs of a pass of the block
constexpr int kChunkFloats = 8192;              // of input rows in shared memory

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
    int width;    // outputs of a block; gated: of each matrix
    int span;     // `width` (gated: twice it) padded to kSpan

    Input input;
    const float* from;  // plain: (rows, from_width)
    int from_width;
    Residual residual;      // also of pair
    const float* e;         // pair: (rows, width)
    const float* norm;      // (width), or null
    float* resolved;        // residual: (rows, width), where x goes with what was pending; may be null
    const SlotTile* slots;  // stored

    Output output;
    float* to;
    int to_width;
    float scale;  // of logits
    Heads heads;
    Visits visits;
};

// What a block knows of its rows, in shared memory.
template <int kRows>
struct Tile {
    int row[kRows];  // a row, or a slot of `cache`; -1 = none
    float pending_factor[kRows], norm_factor[kRows];
};

// Shared memory of a block: input rows, outputs, the tile.
template <int kRows>
constexpr size_t product_shared(int span) {
    return sizeof(float) * (kChunkFloats + static_cast<size_t>(kRows) * span) + sizeof(Tile<kRows>);
}

// Finds the block's rows; whether there are any.
template <int kRows>
__device__ __forceinline__ bool find_rows(const Product& p, Tile<kRows>& tile) {
    const int r = static_cast<int>(threadIdx.x);
    if (r < kRows) {
        if (p.input == Input::stored)
            tile.row[r] = r < p.slots[blockIdx.x].count ? p.slots[blockIdx.x].first + r : -1;
        else
            tile.row[r] = p.list.row(p.rows, static_cast<int>(blockIdx.x) * kRows + r);
        tile.pending_factor[r] = tile.norm_factor[r] = 1;
    }
    __syncthreads();
    bool any = false;
    for (int i = 0; i < kRows; ++i) any = any || tile.row[i] >= 0;
    return any;
}

// One factor per row of the tile, from the sum of squares of value(place, k, pending factor). `room`: shared memory of
// kRows * kThreads floats. A warp adds up what the block's threads have summed of a row.
template <int kRows, class Value>
__device__ __forceinline__ void find_factor(const Product& p, Tile<kRows>& tile, float* room, float* factors,
                                            Value value) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
        float sum = 0;
        const size_t at = static_cast<size_t>(tile.row[r] < 0 ? 0 : tile.row[r]) * p.shape.width;
        if (tile.row[r] >= 0)
            for (int k = thread; k < p.shape.d_model; k += kThreads) {
                const float x = value(at + k, k, tile.pending_factor[r]);
                sum = fmaf(x, x, sum);
            }
        room[r * kThreads + thread] = sum;
    }
    __syncthreads();
    for (int row = thread / 32; row < kRows; row += kWarps) {
        float sum = 0;
        for (int i = thread % 32; i < kThreads; i += 32) sum += room[row * kThreads + i];
        sum = warp_sum(sum);
        if (thread % 32 == 0) factors[row] = norm_factor(sum, p.shape);
    }
    __syncthreads();
}

template <int kRows>
__device__ __forceinline__ void find_factors(const Product& p, Tile<kRows>& tile, float* room) {
    if (p.input != Input::residual) return;
    if (p.residual.has_norm())
        find_factor<kRows>(p, tile, room, tile.pending_factor,
                           [&](size_t i, int, float) { return p.residual.normed_part(i); });
    if (p.norm)
        find_factor<kRows>(p, tile, room, tile.norm_factor,
                           [&](size_t i, int k, float factor) { return p.residual.at(i, k, factor); });
}

// Input k of a row of the tile; k is below p.inputs.
template <int kRows>
__device__ __forceinline__ float input_at(const Product& p, const Tile<kRows>& tile, int r, int k) {
    const int row = tile.row[r];
    switch (p.input) {
        case Input::residual: {
            const float x = p.residual.at(static_cast<size_t>(row) * p.shape.width + k, k, tile.pending_factor[r]);
            return p.norm ? x * tile.norm_factor[r] * p.norm[k] : x;
        }
        case Input::pair: {
            const size_t at = static_cast<size_t>(row) * p.shape.width;
            return k < p.shape.d_model ? p.residual.x[at + k] : p.e[at + k - p.shape.d_model];
        }
        case Input::stored: {
            const SlotTile& slots = p.slots[blockIdx.x];
            const CacheView& cache = p.rows.cache[slots.cache];
            const int visit = p.visits.first + (p.list.step < 0 ? 0 : slots.loop + p.list.step) * p.visits.per_loop;
            return stored_element(cache.mode, cache.input(visit, row), p.shape.d_model, k);
        }
        default:
            return p.from[static_cast<size_t>(row) * p.from_width + k];
    }
}

// The matrix row of output `o` of the block's span.
template <int kDtype>
__device__ __forceinline__ const void* matrix_row(const Product& p, int o) {
    const bool up = p.output == Output::gated && o >= p.width;
    if (up) o -= p.width;
    const int number = o < p.width ? static_cast<int>(blockIdx.y) * p.width + o : p.outputs;
    if (number >= p.outputs) return p.weights;  // padding: any row will do
    const size_t at = static_cast<size_t>(up ? p.outputs + number : number) * p.stride;
    return static_cast<const char*>(p.weights) + at * (kDtype == TL_F32 ? 4 : 2);
}

// Whether output `o` of the block's span is one, not padding.
__device__ __forceinline__ bool is_output(const Product& p, int o) {
    const bool up = p.output == Output::gated && o >= p.width;
    const int of_block = up ? o - p.width : o;
    return of_block < p.width && static_cast<int>(blockIdx.y) * p.width + of_block < p.outputs;
}

// Makes inputs begin .. begin + count - 1 of the tile's rows.
template <int kRows>
__device__ __forceinline__ void fill(const Product& p, const Tile<kRows>& tile, float* inputs, int begin, int count,
                                     bool write_down) {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r)
        for (int k = static_cast<int>(threadIdx.x); k < count; k += kThreads) {
            const bool some = tile.row[r] >= 0 && begin + k < p.inputs;
            inputs[r * (kChunkFloats / kRows) + k] = some ? input_at<kRows>(p, tile, r, begin + k) : 0.0f;
            if (some && write_down) {
                const size_t at = static_cast<size_t>(tile.row[r]) * p.shape.width + begin + k;
                p.resolved[at] = p.residual.at(at, begin + k, tile.pending_factor[r]);
            }
        }
}

template <int kDtype, int kRows>
__device__ __forceinline__ void multiply(const Product& p, const Tile<kRows>& tile, float* inputs, float* outputs) {
    constexpr int kChunk = kChunkFloats / kRows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool all_fits = p.stride <= kChunk;
    const bool write_down = p.input == Input::residual && p.resolved && blockIdx.y == 0;
    for (int pass = 0; pass < p.span; pass += kSpan) {
        const int first = pass + warp * kOutputsAtOnce;
        const bool busy = is_output(p, first);  // the same for all of the warp
        const void* w[kOutputsAtOnce];
#pragma unroll
        for (int o = 0; o < kOutputsAtOnce; ++o) w[o] = matrix_row<kDtype>(p, first + o);
        float sums[kOutputsAtOnce * kRows];
#pragma unroll
        for (int i = 0; i < kOutputsAtOnce * kRows; ++i) sums[i] = 0;
        for (int begin = 0; begin < p.stride; begin += kChunk) {
            const int count = p.stride - begin < kChunk ? p.stride - begin : kChunk;
            if (pass == 0 || !all_fits) {
                __syncthreads();  // what was read of the chunk before
                fill<kRows>(p, tile, inputs, begin, count, write_down && pass == 0);
                __syncthreads();
            }
            for (int k = busy ? lane * 8 : count; k < count; k += 256) {
                float weight[kOutputsAtOnce][8];
#pragma unroll
                for (int o = 0; o < kOutputsAtOnce; ++o) load8<kDtype>(w[o], begin + k, weight[o]);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    float x[8];
                    load8<TL_F32>(inputs + r * kChunk, k, x);
#pragma unroll
                    for (int i = 0; i < 8; ++i)
#pragma unroll
                        for (int o = 0; o < kOutputsAtOnce; ++o)
                            sums[o * kRows + r] = fmaf(x[i], weight[o][i], sums[o * kRows + r]);
                }
            }
        }
        if (!busy) continue;
        constexpr int kShare = 32 / (kOutputsAtOnce * kRows);
        const float sum = warp_sums<kOutputsAtOnce * kRows>(sums);
        const int number = lane / kShare;
        if (lane % kShare == 0) outputs[number % kRows * p.span + first + number / kRows] = sum;
    }
    __syncthreads();
}

// What caches that hold inputs keep of the tile's rows: their normed inputs.
template <int kRows>
__device__ __forceinline__ void append_inputs(const Product& p, const Tile<kRows>& tile) {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
        if (tile.row[r] < 0) continue;
        const tl_row& row = p.rows.row[tile.row[r]];
        const CacheView& cache = p.rows.cache[row.cache];
        if (!cache.holds_inputs()) continue;
        if (threadIdx.x == 0) cache.positions[cache.at(row.slot)] = row.position;
        uint8_t* to = cache.input(p.visits.of(row, p.list.step), row.slot);
        for (int first = static_cast<int>(threadIdx.x) / 32 * kGroup; first < p.inputs; first += kWarps * kGroup) {
            const int k = first + static_cast<int>(threadIdx.x) % 32;
            store_input(cache.mode, k < p.inputs ? input_at<kRows>(p, tile, r, k) : 0.0f, p.inputs, k, to);
        }
    }
}

// The block's outputs, (kRows, span) in shared memory, go where they belong.
template <int kRows>
__device__ __forceinline__ void put(const Product& p, const Tile<kRows>& tile, float* outputs) {
    const int block = static_cast<int>(blockIdx.y), warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
        if (tile.row[r] < 0) continue;
        float* from = outputs + r * p.span;
        if (p.output == Output::heads || p.output == Output::kept) {  // a warp per row
            if (r % kWarps != warp) continue;
            if (p.output == Output::heads)
                put_head(p.heads, p.shape, p.rows, p.visits, p.list.step, tile.row[r], block, from, p.to, p.to_width);
            else
                put_projected(p.heads, p.shape, p.rows.cache[p.slots[blockIdx.x].cache], tile.row[r], block, from);
            continue;
        }
        const int row = p.output == Output::logits ? static_cast<int>(blockIdx.x) * kRows + r : tile.row[r];
        float* to = p.to + static_cast<size_t>(row) * p.to_width + static_cast<size_t>(block) * p.width;
        for (int o = static_cast<int>(threadIdx.x); o < p.width && block * p.width + o < p.outputs; o += kThreads) {
            float value = from[o];
            if (p.output == Output::gated) value = value / (1.0f + expf(-value)) * from[p.width + o];
            to[o] = p.output == Output::logits ? value * p.scale : value;
        }
    }
}

template <int kDtype, int kRows>
__global__ void __launch_bounds__(kThreads, 2) product(const __grid_constant__ Product p) {
    TL_DYNAMIC_SHARED(float, shared);
    float* outputs = shared + kChunkFloats;
    Tile<kRows>& tile = *reinterpret_cast<Tile<kRows>*>(outputs + static_cast<size_t>(kRows) * p.span);
    if (!find_rows<kRows>(p, tile)) return;
    find_factors<kRows>(p, tile, shared);
    multiply<kDtype, kRows>(p, tile, shared, outputs);
    if (p.output == Output::heads && blockIdx.y == 0) append_inputs<kRows>(p, tile);
    put<kRows>(p, tile, outputs);
}

}  // namespace tinyloop::gpu
