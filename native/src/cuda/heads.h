// What happens to one head's queries, keys or values after their product: bias, norm, rotary embedding, and for keys
// and values the cache. One warp works on one head of one row.
#pragma once
#include "call.h"
#include "reduce.h"

namespace tinyloop::gpu {

struct Heads {                              // of a layer; null = it has none
    const float *q_bias, *k_bias, *v_bias;  // (heads * head_dim)
    const float *q_norm, *k_norm;           // (head_dim)
    const float* angles;                    // (positions, head_dim / 2) pairs of cos, sin
};

// Dimensions a and b of a head that are rotated together, as pair number `pair`.
__device__ __forceinline__ void find_pair(const Shape& shape, int pair, int& a, int& b) {
    const bool half = shape.rope == TL_ROPE_HALF;
    a = half ? pair : 2 * pair;
    b = half ? pair + shape.head_dim / 2 : 2 * pair + 1;
}

// Bias, norm and rotary embedding (Su et al., arXiv 2104.09864), in place. Each lane owns whole pairs, so that no lane
// reads what another one writes. `position` < 0: no rotation.
__device__ __forceinline__ void finish_head(const Shape& shape, const float* bias, const float* norm,
                                            const float* angles, int position, float* head) {
    const int lane = threadIdx.x % 32, pairs = shape.head_dim / 2;
    float squares = 0;
    int a, b;
    for (int pair = lane; pair < pairs; pair += 32) {
        find_pair(shape, pair, a, b);
        if (bias) head[a] += bias[a], head[b] += bias[b];
        squares = fmaf(head[a], head[a], squares);
        squares = fmaf(head[b], head[b], squares);
    }
    float factor = 1;
    if (norm) factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(shape.head_dim) + shape.eps);
    for (int pair = lane; pair < pairs; pair += 32) {
        find_pair(shape, pair, a, b);
        if (norm) head[a] = head[a] * factor * norm[a], head[b] = head[b] * factor * norm[b];
        if (position < 0) continue;
        const float* angle = angles + (static_cast<size_t>(position) * pairs + pair) * 2;
        const float x = head[a], y = head[b];
        head[a] = fmaf(x, angle[0], -(y * angle[1]));
        head[b] = fmaf(y, angle[0], x * angle[1]);
    }
    __syncwarp();
}

// A key or value head into its slot: fp16, or int8 with the slot's scale.
__device__ __forceinline__ void append_head(const CacheView& cache, const Shape& shape, int visit, int plane, int slot,
                                            const float* head) {
    const int lane = threadIdx.x % 32;
    uint8_t* to = cache.key_or_value(visit, plane, slot);
    if (cache.mode == TL_CACHE_FP16) {
        for (int k = lane; k < shape.head_dim; k += 32) reinterpret_cast<uint16_t*>(to)[k] = float_to_half(head[k]);
        return;
    }
    float largest = 0;
    for (int k = lane; k < shape.head_dim; k += 32) largest = fabsf(head[k]) > largest ? fabsf(head[k]) : largest;
    const float scale = finite(warp_max(largest)) / 127.0f;
    for (int k = lane; k < shape.head_dim; k += 32)
        reinterpret_cast<int8_t*>(to)[k] = static_cast<int8_t>(scale > 0 ? nearest(head[k] / scale, 127.0f) : 0);
    if (lane == 0) cache.scales[cache.place(visit, plane, slot)] = scale;
}

// Head `number` of the queries, then the keys, then the values of a row.
__device__ __forceinline__ void put_head(const Heads& heads, const Shape& shape, const Rows& rows, const Visits& visits,
                                         int step, int row_number, int number, float* head, float* queries,
                                         int queries_width) {
    const tl_row& row = rows.row[row_number];
    const int hd = shape.head_dim;
    if (number < shape.n_heads) {
        finish_head(shape, heads.q_bias ? heads.q_bias + number * hd : nullptr, heads.q_norm, heads.angles,
                    row.position, head);
        float* to = queries + static_cast<size_t>(row_number) * queries_width + static_cast<size_t>(number) * hd;
        for (int k = threadIdx.x % 32; k < hd; k += 32) to[k] = head[k];
        return;
    }
    const CacheView& cache = rows.cache[row.cache];
    if (cache.holds_inputs()) return;
    const int plane = number - shape.n_heads, kv = shape.n_kv_heads;
    if (plane < kv)
        finish_head(shape, heads.k_bias ? heads.k_bias + plane * hd : nullptr, heads.k_norm, heads.angles, row.position,
                    head);
    else
        finish_head(shape, heads.v_bias ? heads.v_bias + (plane - kv) * hd : nullptr, nullptr, nullptr, -1, head);
    append_head(cache, shape, visits.of(row, step), plane, row.slot, head);
}

// Head `plane` of the keys, then the values, of a stored slot.
__device__ __forceinline__ void put_projected(const Heads& heads, const Shape& shape, const CacheView& cache, int slot,
                                              int plane, float* head) {
    const int hd = shape.head_dim, kv = shape.n_kv_heads;
    if (plane < kv)
        finish_head(shape, heads.k_bias ? heads.k_bias + plane * hd : nullptr, heads.k_norm, heads.angles,
                    cache.positions[slot], head);
    else
        finish_head(shape, heads.v_bias ? heads.v_bias + (plane - kv) * hd : nullptr, nullptr, nullptr, -1, head);
    float* to = cache.projected + (static_cast<size_t>(plane) * cache.projected_slots + slot) * hd;
    for (int k = threadIdx.x % 32; k < hd; k += 32) to[k] = head[k];
}

// Element k of a stored input, n elements long; a warp stores a group of 32 together. Elements from n on are padding.
__device__ __forceinline__ void store_input(int mode, float value, int n, int k, uint8_t* to) {
    if (mode == TL_CACHE_H_FP16) {
        if (k < n) reinterpret_cast<uint16_t*>(to)[k] = float_to_half(value);
        return;
    }
    const float limit = mode == TL_CACHE_H_INT8 ? 127.0f : 7.0f;
    const int all = padded(n, kGroup);
    const uint16_t half = float_to_half(finite(warp_max(fabsf(value))) / limit);
    const float scale = half_to_float(half);
    const int q = scale > 0 ? nearest(value / scale, limit) : 0;
    if (mode == TL_CACHE_H_INT8) {
        to[k] = static_cast<uint8_t>(static_cast<int8_t>(q));
    } else {
        const int next = __shfl_xor_sync(~0u, q, 1);
        if (k % 2 == 0) to[k / 2] = static_cast<uint8_t>((q + 8) | (next + 8) << 4);
    }
    if (k % kGroup == 0) reinterpret_cast<uint16_t*>(to + (mode == TL_CACHE_H_INT8 ? all : all / 2))[k / kGroup] = half;
}

}  // namespace tinyloop::gpu
