// The first tokens of a row in rank, so that a host that samples from few of them need not be sent all. Tokens have a
// total order, so what is found does not depend on how a row is cut.
#pragma once
#include "call.h"

namespace tinyloop::gpu {

constexpr int kSlice = 1024;          // of a row: one block's, which is one warp
constexpr int kNoToken = 0x7FFFFFFF;  // behind all tokens: what has no rank

struct Best {
    Rows rows;
    List list;            // whose logits these are
    const float* logits;  // (list.count, vocab_size)
    int vocab_size, slices;
    int stride;      // the most that one of the rows wants
    tl_rank* found;  // (list.count, slices, stride): the first of each slice
    int* arrived;    // (list.count)
    tl_rank* best;   // (list.count, stride)
};

constexpr size_t best_shared(int slices) { return sizeof(int) * (1 + static_cast<size_t>(slices)); }

__device__ __forceinline__ bool before(const tl_rank& a, const tl_rank& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

__device__ __forceinline__ tl_rank warp_first(tl_rank rank) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        const tl_rank other{__shfl_xor_sync(~0u, rank.logit, apart), __shfl_xor_sync(~0u, rank.id, apart)};
        if (before(other, rank)) rank = other;
    }
    return rank;
}

// The first after `last` among the lane's own tokens of a slice, every 32nd one.
__device__ __forceinline__ tl_rank next_in_slice(const float* logits, int begin, int end, const tl_rank& last) {
    tl_rank first{-INFINITY, kNoToken};
    for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += 32) {
        const tl_rank here{logits[id], id};
        if (here.logit > -INFINITY && before(last, here) && before(here, first)) first = here;  // NaN is never more
    }
    return first;
}

// The first among the heads of the lane's own lists, every 32nd one; taken: how many of each are gone.
__device__ __forceinline__ tl_rank next_in_lists(const tl_rank* lists, int count, int stride, int wanted,
                                                 const int* taken) {
    tl_rank first{-INFINITY, kNoToken};
    for (int list = static_cast<int>(threadIdx.x); list < count; list += 32) {
        if (taken[list] == wanted) continue;
        const tl_rank head = lists[static_cast<size_t>(list) * stride + taken[list]];
        if (before(head, first)) first = head;
    }
    return first;
}

// A block per slice and row. The last of a row's blocks puts their lists together.
__global__ void __launch_bounds__(32) best(const __grid_constant__ Best a) {
    TL_DYNAMIC_SHARED(int, room);
    const int index = static_cast<int>(blockIdx.x), slice = static_cast<int>(blockIdx.y);
    const int number = a.list.row(a.rows, index), wanted = number < 0 ? 0 : a.rows.row[number].best;
    if (wanted == 0) return;
    const float* logits = a.logits + static_cast<size_t>(index) * a.vocab_size;
    tl_rank* lists = a.found + static_cast<size_t>(index) * a.slices * a.stride;
    const int begin = slice * kSlice, end = begin + kSlice < a.vocab_size ? begin + kSlice : a.vocab_size;

    tl_rank* found = lists + static_cast<size_t>(slice) * a.stride;
    tl_rank mine = next_in_slice(logits, begin, end, {INFINITY, -1});
    for (int i = 0; i < wanted; ++i) {
        const tl_rank first = warp_first(mine);
        if (threadIdx.x == 0) found[i] = first;
        if (first.id == mine.id && first.id != kNoToken) mine = next_in_slice(logits, begin, end, first);
    }
    if (!last_to_arrive(a.arrived + index, a.slices, room)) return;

    int* taken = room + 1;  // each lane has its own lists
    for (int list = static_cast<int>(threadIdx.x); list < a.slices; list += 32) taken[list] = 0;
    mine = next_in_lists(lists, a.slices, a.stride, wanted, taken);
    tl_rank* to = a.best + static_cast<size_t>(index) * a.stride;
    for (int i = 0; i < wanted; ++i) {
        const tl_rank first = warp_first(mine);
        const bool none = first.id == kNoToken;
        if (threadIdx.x == 0) to[i] = {first.logit, none ? -1 : first.id};
        if (none || first.id != mine.id) continue;
        ++taken[first.id / kSlice];
        mine = next_in_lists(lists, a.slices, a.stride, wanted, taken);
    }
}

}  // namespace tinyloop::gpu
