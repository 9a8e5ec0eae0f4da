// Softmax attention of queries over a cache, whatever it keeps.
//
// What a row sees is numbered as in a plain sequence: 0 .. base-1, then the slots of its tree bits, so a row of a draft
// tree adds up in the order it would have in a sequence. The numbers are cut into splits of 128, counted from 0. A
// split is summed by itself, tile by tile with a running maximum ("online softmax", Milakov and Gimelshein, arXiv
// 1805.02867), and splits are merged one by one, from the first to the last: by the one block that takes them all, or,
// where each split has a block, by the last of these to arrive, from the sums that they left. Neither that nor how many
// rows share a block changes a sum.
#pragma once
#include "call.h"
#include "reduce.h"

namespace tinyloop::gpu {

constexpr int kAttentionThreads = kThreads / 2;
constexpr int kSplit = 128;
constexpr int kTileFloats = 2048;  // of keys, and of values, in shared memory
constexpr int kMostQueries = 32;
constexpr int kLanesPerScore = 8;

struct Attention {
    Shape shape;
    Rows rows;
    List list;
    const Group* groups;
    Visits visits;
    const float* queries;  // (rows, n_heads * head_dim)
    int heads_per_block, blocks_per_key_head;
    int splits;       // 0: a block takes all of its group's; else the most of a group, each with a block
    float* partial;   // (rows, n_heads, splits, 2 + head_dim): maximum, sum of weights, weighted values
    int* arrived;     // (groups, blocks of key heads), all 0
    float* attended;  // (rows, attended_width)
    int attended_width;
};

// How many numbers a tile takes, and how many queries (rows times heads) a block.
__host__ __device__ constexpr int tile_of(int head_dim) {
    int tile = 32;
    while (tile > 1 && tile * head_dim > kTileFloats) tile /= 2;
    return tile;
}
__host__ __device__ constexpr int most_queries(int head_dim) {
    return kTileFloats / head_dim < kMostQueries ? kTileFloats / head_dim : kMostQueries;
}

// Walks a block's threads over the pairs (row, column) of `columns` columns, without a division at each step.
struct Walk {
    int row, column;
    const int rows_on, columns_on, columns;

    __device__ explicit Walk(int columns_)
        : row(static_cast<int>(threadIdx.x) / columns_),
          column(static_cast<int>(threadIdx.x) % columns_),
          rows_on(kAttentionThreads / columns_),
          columns_on(kAttentionThreads % columns_),
          columns(columns_) {}
    __device__ int at() const { return row * columns + column; }
    __device__ void next() {
        row += rows_on;
        column += columns_on;
        if (column >= columns) {
            column -= columns;
            ++row;
        }
    }
};

// One query's place in the block, in shared memory.
struct Query {
    int row, head;               // row -1: does not run
    int begin, end;              // the numbers it sees
    float highest, sum;          // of this split so far
    float all_highest, all_sum;  // of the splits before
    float old_factor, new_factor;
    int sees;  // something of this tile
};

// Shared memory of a block: keys with one float between rows, values, queries, sums of this split and of all, scores.
constexpr size_t attention_shared(int head_dim) {
    const size_t tile = static_cast<size_t>(tile_of(head_dim)), most = static_cast<size_t>(most_queries(head_dim)),
                 hd = static_cast<size_t>(head_dim);
    return sizeof(float) * (tile * (hd + 1) + tile * hd + 3 * most * hd + most * tile) + sizeof(Query) * most + 16;
}

// Number i of what a row sees, as a slot of its cache.
__device__ __forceinline__ int slot_of(const tl_row& row, bool plain, int i) {
    if (plain || i < row.base) return i;
    unsigned long long tree = row.tree;
    for (int n = i - row.base; n > 0; --n) tree &= tree - 1;
    return row.base + __ffsll(tree) - 1;
}

// A running sum (highest, sum) takes in another one; values are then old * old_factor + other * new_factor.
__device__ __forceinline__ void merge(float& highest, float& sum, float other_highest, float other_sum,
                                      float& old_factor, float& new_factor) {
    old_factor = 1;
    new_factor = 0;
    if (other_highest == -INFINITY) return;
    const float top = other_highest > highest ? other_highest : highest;
    old_factor = expf(highest - top);
    new_factor = expf(other_highest - top);
    sum = fmaf(sum, old_factor, other_sum * new_factor);
    highest = top;
}

// Keys and values of numbers first .. first + count - 1.
__device__ __forceinline__ void load_tile(const CacheView& cache, const Shape& shape, const tl_row& row, bool plain,
                                          int visit, int key_head, int first, int count, float* keys, float* values) {
    const int hd = shape.head_dim, lane = threadIdx.x % 32, value_plane = shape.n_kv_heads + key_head;
    for (int t = static_cast<int>(threadIdx.x) / 32; t < count; t += kAttentionThreads / 32) {
        const int slot = slot_of(row, plain, first + t);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            float* to = which ? values + t * hd : keys + t * (hd + 1);
            const int plane = which ? value_plane : key_head;
            if (cache.holds_inputs()) {
                const float* from =
                    cache.projected + (static_cast<size_t>(plane) * cache.projected_slots + cache.at(slot)) * hd;
                for (int k = lane; k < hd; k += 32) to[k] = from[k];
            } else if (cache.mode == TL_CACHE_FP16) {
                const auto* from = reinterpret_cast<const uint16_t*>(cache.key_or_value(visit, plane, slot));
                for (int k = lane; k < hd; k += 32) to[k] = half_to_float(from[k]);
            } else {
                const auto* from = reinterpret_cast<const int8_t*>(cache.key_or_value(visit, plane, slot));
                const float scale = cache.scales[cache.place(visit, plane, slot)];
                for (int k = lane; k < hd; k += 32) to[k] = static_cast<float>(from[k]) * scale;
            }
        }
    }
}

// scores[q][t] = query q times key t, the first `count` keys of a tile; 8 lanes to a score.
__device__ __forceinline__ void score_tile(const Shape& shape, int queries, int tile, int count, const float* query,
                                           const float* keys, float* scores) {
    const int hd = shape.head_dim, part = static_cast<int>(threadIdx.x) % kLanesPerScore, pairs = queries * count;
    const float factor = 1.0f / sqrtf(static_cast<float>(hd));
    for (int begin = 0; begin < pairs; begin += kAttentionThreads / kLanesPerScore) {
        const int pair = begin + static_cast<int>(threadIdx.x) / kLanesPerScore;
        const int q = pair < pairs ? pair / count : 0, t = pair < pairs ? pair % count : 0;
        float sum = 0;
        for (int k = part; k < hd; k += kLanesPerScore) sum = fmaf(query[q * hd + k], keys[t * (hd + 1) + k], sum);
#pragma unroll
        for (int apart = kLanesPerScore / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (part == 0 && pair < pairs) scores[q * tile + t] = sum * factor;
    }
}

// A query's maximum over the tile, by one thread.
__device__ __forceinline__ void raise(Query& q, int first, int count, float* scores) {
    q.sees = 0;
    float top = q.highest;
    for (int t = 0; t < count; ++t) {
        const bool seen = first + t >= q.begin && first + t < q.end;
        if (!seen) scores[t] = -INFINITY;
        if (seen && scores[t] > top) top = scores[t];
        q.sees |= seen;
    }
    if (!q.sees) return;
    q.old_factor = expf(q.highest - top);
    q.highest = top;
}

__global__ void __launch_bounds__(kAttentionThreads, 5) attention(const __grid_constant__ Attention a) {
    const Shape& shape = a.shape;
    const int hd = shape.head_dim, tile = tile_of(hd), most = most_queries(hd);
    TL_DYNAMIC_SHARED(float, keys);
    float* values = keys + tile * (hd + 1);
    float* query = values + tile * hd;
    float* sums = query + most * hd;
    float* all_sums = sums + most * hd;
    float* scores = all_sums + most * hd;
    Query* about = reinterpret_cast<Query*>(scores + most * tile);
    int* flag = reinterpret_cast<int*>(about + most);

    const Group group = a.groups[blockIdx.x];
    const int key_head = static_cast<int>(blockIdx.y) / a.blocks_per_key_head;
    const int first_head = static_cast<int>(blockIdx.y) % a.blocks_per_key_head * a.heads_per_block;
    const int heads = shape.queries - first_head < a.heads_per_block ? shape.queries - first_head : a.heads_per_block;
    const int queries = group.count * heads;
    int leader = -1, begin = INT32_MAX, end = 0;
    for (int m = 0; m < group.count; ++m) {
        const int number = a.list.row(a.rows, group.first + m);
        if (number < 0) continue;
        const tl_row& row = a.rows.row[number];
        const int sees_from = a.rows.cache[row.cache].first_seen(row.slot), sees_to = row.base + __popcll(row.tree);
        leader = number;
        begin = sees_from < begin ? sees_from : begin;
        end = sees_to > end ? sees_to : end;
    }
    const int splits = (end + kSplit - 1) / kSplit;
    if (leader < 0 || static_cast<int>(blockIdx.z) >= splits) return;
    const int first_split = a.splits ? static_cast<int>(blockIdx.z) : 0,
              last_split = a.splits ? first_split + 1 : splits;
    const bool shared = a.splits && splits > 1;  // by several blocks
    const tl_row& lead = a.rows.row[leader];
    const CacheView& cache = a.rows.cache[lead.cache];
    const bool plain = (lead.tree & (lead.tree + 1)) == 0;
    const int visit = a.visits.of(lead, a.list.step);

    for (int q = static_cast<int>(threadIdx.x); q < queries; q += kAttentionThreads) {
        const int number = a.list.row(a.rows, group.first + q / heads);
        about[q] = {number, key_head * shape.queries + first_head + q % heads, 0, 0, -INFINITY, 0, -INFINITY, 0, 1, 1,
                    0};
        if (number < 0) continue;
        const tl_row& row = a.rows.row[number];
        about[q].begin = cache.first_seen(row.slot);
        about[q].end = row.base + __popcll(row.tree);
    }
    __syncthreads();
    for (Walk w(hd); w.row < queries; w.next()) {
        const Query& q = about[w.row];
        query[w.at()] =
            q.row < 0 ? 0.0f : a.queries[(static_cast<size_t>(q.row) * shape.n_heads + q.head) * hd + w.column];
        all_sums[w.at()] = 0;
    }

    for (int split = first_split * kSplit; split < last_split * kSplit; split += kSplit) {
        const int split_end = split + kSplit < end ? split + kSplit : end;
        if (split_end <= begin) continue;
        for (int i = static_cast<int>(threadIdx.x); i < queries * hd; i += kAttentionThreads) sums[i] = 0;
        for (int q = static_cast<int>(threadIdx.x); q < queries; q += kAttentionThreads)
            about[q].highest = -INFINITY, about[q].sum = 0;
        for (int first = split; first < split_end; first += tile) {
            if (first + tile <= begin) continue;
            const int count = split_end - first < tile ? split_end - first : tile;
            __syncthreads();
            load_tile(cache, shape, lead, plain, visit, key_head, first, count, keys, values);
            __syncthreads();
            score_tile(shape, queries, tile, count, query, keys, scores);
            __syncthreads();
            for (int q = static_cast<int>(threadIdx.x); q < queries; q += kAttentionThreads)
                raise(about[q], first, count, scores + q * tile);
            __syncthreads();
            for (Walk w(tile); w.row < queries; w.next())
                if (w.column < count && about[w.row].sees) scores[w.at()] = expf(scores[w.at()] - about[w.row].highest);
            __syncthreads();
            for (int q = static_cast<int>(threadIdx.x); q < queries; q += kAttentionThreads) {
                if (!about[q].sees) continue;
                float sum = about[q].sum * about[q].old_factor;
                for (int t = 0; t < count; ++t) sum += scores[q * tile + t];
                about[q].sum = sum;
            }
            for (Walk w(hd); w.row < queries; w.next()) {
                if (!about[w.row].sees) continue;
                float sum = sums[w.at()] * about[w.row].old_factor;
                const float* weights = scores + w.row * tile;
                for (int t = 0; t < count; ++t) sum = fmaf(weights[t], values[t * hd + w.column], sum);
                sums[w.at()] = sum;
            }
        }
        __syncthreads();
        for (int q = static_cast<int>(threadIdx.x); q < queries; q += kAttentionThreads)
            merge(about[q].all_highest, about[q].all_sum, about[q].highest, about[q].sum, about[q].old_factor,
                  about[q].new_factor);
        __syncthreads();
        for (Walk w(hd); w.row < queries; w.next())
            all_sums[w.at()] = fmaf(all_sums[w.at()], about[w.row].old_factor, sums[w.at()] * about[w.row].new_factor);
    }
    __syncthreads();

    const size_t stride = static_cast<size_t>(hd) + 2;
    if (shared) {
        for (Walk w(hd); w.row < queries; w.next()) {
            const Query& q = about[w.row];
            if (q.row < 0) continue;
            float* to =
                a.partial + ((static_cast<size_t>(q.row) * shape.n_heads + q.head) * a.splits + first_split) * stride;
            to[2 + w.column] = all_sums[w.at()];
            if (w.column == 0) to[0] = q.all_highest, to[1] = q.all_sum;
        }
        int* counter =
            a.arrived + blockIdx.x * static_cast<unsigned>(shape.n_kv_heads * a.blocks_per_key_head) + blockIdx.y;
        if (!last_to_arrive(counter, splits, flag)) return;
    }
    for (Walk w(hd); w.row < queries; w.next()) {
        const Query& q = about[w.row];
        if (q.row < 0) continue;
        float highest = q.all_highest, sum = q.all_sum, value = all_sums[w.at()];
        if (shared) {
            highest = -INFINITY;
            sum = value = 0;
            const float* from = a.partial + (static_cast<size_t>(q.row) * shape.n_heads + q.head) * a.splits * stride;
            for (int n = 0; n < splits; ++n, from += stride) {
                float old_factor, new_factor;
                merge(highest, sum, from[0], from[1], old_factor, new_factor);
                value = fmaf(value, old_factor, from[2 + w.column] * new_factor);
            }
        }
        a.attended[static_cast<size_t>(q.row) * a.attended_width + static_cast<size_t>(q.head) * hd + w.column] =
            value / sum;
    }
}

}  // namespace tinyloop::gpu
