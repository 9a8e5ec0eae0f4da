// The inputs of a product: the rows that a block takes, what is pending for them and their norms, one element of them;
// and a kernel that writes them down, for products with so many rows that no block should make them again.
#pragma once
#include "product.h"
#include "reduce.h"

namespace tinyloop::gpu {

// What a block knows of its rows, in shared memory.
template <int kRows>
struct Tile {
    int row[kRows];  // a row, or a slot of `cache`; -1 = none
    float pending_factor[kRows], norm_factor[kRows];
};

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

// Writes down element k of x with what was pending.
template <int kRows>
__device__ __forceinline__ void resolve(const Product& p, const Tile<kRows>& tile, int r, int k) {
    const size_t at = static_cast<size_t>(tile.row[r]) * p.shape.width + k;
    p.resolved[at] = p.residual.at(at, k, tile.pending_factor[r]);
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

// Takes in what is pending: writes a row's x down, its inputs, and what a cache keeps of them. One block per row.
__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ Product p) {
    TL_DYNAMIC_SHARED(float, room);
    Tile<1>& tile = *reinterpret_cast<Tile<1>*>(room + kThreads);
    if (!find_rows<1>(p, tile)) return;
    find_factors<1>(p, tile, room);
    const size_t row = static_cast<size_t>(tile.row[0]);
    for (int k = static_cast<int>(threadIdx.x); k < p.inputs; k += kThreads) {
        p.prepared[row * p.prepared_width + k] = input_at<1>(p, tile, 0, k);
        if (p.input == Input::residual && p.resolved) resolve<1>(p, tile, 0, k);
    }
    if (p.output == Output::heads) append_inputs<1>(p, tile);
}
constexpr size_t prepare_shared() { return sizeof(float) * kThreads + sizeof(Tile<1>); }

}  // namespace tinyloop::gpu
