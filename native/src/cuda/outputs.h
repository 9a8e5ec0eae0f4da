// The outputs of a product go where they belong: rows of a matrix, heads of queries, keys and values, logits.
#pragma once
#include "product.h"
#include "reduce.h"

namespace tinyloop::gpu {

// Outputs of `count` rows, (count, span) in shared memory. row[i] is a row, or a slot of the cache, or -1; `first` is
// the place of row[0] in the list.
__device__ __forceinline__ void put(const Product& p, const int* row, int count, int first, float* outputs) {
    const int block = static_cast<int>(blockIdx.y), warp = static_cast<int>(threadIdx.x) / 32, span = p.span();
    if (p.output == Output::heads || p.output == Output::kept) {  // a warp per head
#pragma unroll 1
        for (int i = warp; i < count * p.units; i += kWarps) {
            const int r = i / p.units, unit = i % p.units, head = block * p.units + unit;
            if (row[r] < 0 || head * p.width >= p.outputs) continue;
            float* from = outputs + r * span + unit * p.pitch;
            if (p.output == Output::heads)
                put_head(p.heads, p.shape, p.rows, p.visits, p.list.step, row[r], head, from, p.to, p.to_width);
            else
                put_projected(p.heads, p.shape, p.rows.cache[p.slots[blockIdx.x].cache], row[r], head, from);
        }
        return;
    }
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
        if (row[r] < 0) continue;
        const float* from = outputs + r * span;
        const int place = p.output == Output::logits ? first + r : row[r];
        float* to = p.to + static_cast<size_t>(place) * p.to_width + static_cast<size_t>(block) * p.width;
        for (int o = static_cast<int>(threadIdx.x); o < p.width && block * p.width + o < p.outputs; o += kThreads) {
            float value = from[o];
            if (p.output == Output::gated) value = value / (1.0f + expf(-value)) * from[p.pitch + o];
            to[o] = p.output == Output::logits ? value * p.scale : value;
        }
    }
}

}  // namespace tinyloop::gpu
