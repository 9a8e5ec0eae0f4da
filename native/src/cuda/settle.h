// What happens to whole rows of x between the layers: the embedding, the end of a core loop (with adaptive depth), and
// saving states. One block works on one row.
#pragma once
#include "call.h"
#include "reduce.h"

namespace tinyloop::gpu {

struct Embed {
    Shape shape;
    Rows rows;
    List list;
    const void* matrix;  // (vocab_size, d_model) in rows of `stride`
    int dtype, stride;
    float scale;
    float *x, *e;                 // (rows, width)
    const float *core, *prelude;  // saved states, (count, width)
    float* before;                // of Settle: what a resumed row starts from
};

// x from the token, or x and e from a saved state; and the row is set to run all of its loops.
__global__ void __launch_bounds__(kThreads) embed(const __grid_constant__ Embed a) {
    const int number = a.list.row(a.rows, static_cast<int>(blockIdx.x));
    if (number < 0) return;
    const tl_row& row = a.rows.row[number];
    const size_t to = static_cast<size_t>(number) * a.shape.width;
    const size_t from = static_cast<size_t>(row.state < 0 ? 0 : row.state) * a.shape.width;
    const size_t token = static_cast<size_t>(row.token < 0 ? 0 : row.token) * a.stride;
    const char* weights = static_cast<const char*>(a.matrix) + token * (a.dtype == TL_F32 ? 4 : 2);
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < a.shape.d_model; k += kThreads) {
        if (row.loop_begin > 0) {
            a.x[to + k] = a.core[from + k];
            a.e[to + k] = a.prelude[from + k];
            if (a.before) a.before[to + k] = a.core[from + k];
        } else {
            a.x[to + k] = element(weights, a.dtype, k) * a.scale;
        }
    }
    if (threadIdx.x == 0) {
        a.rows.loops_run[number] = row.loop_end;
        a.rows.stayed[number] = 1;
    }
}

struct Keep {
    Shape shape;
    Rows rows;
    List list;
    const float *x, *e;
    float *core, *prelude;
};

// Saves the states of the rows that want it.
__global__ void __launch_bounds__(kThreads) keep(const __grid_constant__ Keep a) {
    const int number = a.list.row(a.rows, static_cast<int>(blockIdx.x));
    if (number < 0) return;
    const tl_row& row = a.rows.row[number];
    if (row.state < 0 || row.flags & TL_ROW_KEEP_STATE) return;
    const size_t from = static_cast<size_t>(number) * a.shape.width,
                 to = static_cast<size_t>(row.state) * a.shape.width;
    for (int k = static_cast<int>(threadIdx.x); k < a.shape.d_model; k += kThreads) {
        a.core[to + k] = a.x[from + k];
        a.prelude[to + k] = a.e[from + k];
    }
}

struct Settle {
    Shape shape;
    Rows rows;
    List list;
    Residual residual;
    const float* norm;              // of x, or null
    float* x;                       // (rows, width)
    float* e;                       // the prelude's output goes here; null: this is not its end
    bool zeros;                     // ... and x starts at zero
    float* before;                  // x of the loop before, to be replaced by this one; null: no row may stop early
    const float *gate, *gate_bias;  // of the exit gate, or null
    Visits core;                    // the core's first layer
    int n_core;
};

// Whether further loops are not needed: the exit gate's cumulative probability (as in Ouro, arXiv 2510.25741, section
// on adaptive computation), or the relative change of the state. All threads get the answer.
__device__ __forceinline__ bool settled(const Settle& a, int number, float threshold, float* room) {
    const size_t at = static_cast<size_t>(number) * a.shape.width;
    float sums[2] = {0, 0};
    for (int k = static_cast<int>(threadIdx.x); k < a.shape.d_model; k += kThreads) {
        const float x = a.x[at + k];
        if (a.gate) {
            sums[0] = fmaf(a.gate[k], x, sums[0]);
        } else {
            const float old = a.before[at + k];
            sums[0] = fmaf(x - old, x - old, sums[0]);
            sums[1] = fmaf(old, old, sums[1]);
        }
    }
    block_sums<2>(sums, room);
    if (!a.gate) return sums[0] < threshold * threshold * sums[1];
    const float z = sums[0] + (a.gate_bias ? a.gate_bias[0] : 0.0f);
    const float stayed = a.rows.stayed[number] * (1.0f - 1.0f / (1.0f + expf(-z)));
    __syncthreads();
    if (threadIdx.x == 0) a.rows.stayed[number] = stayed;
    return 1.0f - stayed >= threshold;
}

// Gives a slot in visit `to` what visit `from` holds there.
__device__ __forceinline__ void copy_visit(const CacheView& cache, int to, int from, int slot) {
    for (int plane = 0; plane < cache.planes; ++plane) {
        const bool input = cache.holds_inputs();
        auto* target = reinterpret_cast<uint16_t*>(input ? cache.input(to, slot) : cache.key_or_value(to, plane, slot));
        auto* source =
            reinterpret_cast<const uint16_t*>(input ? cache.input(from, slot) : cache.key_or_value(from, plane, slot));
        for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(cache.slot_bytes / 2); i += kThreads)
            target[i] = source[i];
        if (cache.scales && threadIdx.x == 0)
            cache.scales[cache.place(to, plane, slot)] = cache.scales[cache.place(from, plane, slot)];
    }
}

// x takes in what is pending and its norm; at a loop's end the row may stop, and the loops left out are filled.
__global__ void __launch_bounds__(kThreads) settle(const __grid_constant__ Settle a) {
    TL_DYNAMIC_SHARED(float, room);
    const int number = a.list.row(a.rows, static_cast<int>(blockIdx.x)), d = a.shape.d_model;
    if (number < 0) return;
    const size_t at = static_cast<size_t>(number) * a.shape.width;
    float pending_factor = 1, factor = 1, sums[1];
    if (a.residual.has_norm()) {
        sums[0] = 0;
        for (int k = static_cast<int>(threadIdx.x); k < d; k += kThreads) {
            const float value = a.residual.normed_part(at + k);
            sums[0] = fmaf(value, value, sums[0]);
        }
        block_sums<1>(sums, room);
        pending_factor = norm_factor(sums[0], a.shape);
    }
    if (a.norm) {
        sums[0] = 0;
        for (int k = static_cast<int>(threadIdx.x); k < d; k += kThreads) {
            const float value = a.residual.at(at + k, k, pending_factor);
            sums[0] = fmaf(value, value, sums[0]);
        }
        block_sums<1>(sums, room);
        factor = norm_factor(sums[0], a.shape);
    }
    for (int k = static_cast<int>(threadIdx.x); k < d; k += kThreads) {
        float x = a.residual.at(at + k, k, pending_factor);
        if (a.norm) x = x * factor * a.norm[k];
        if (a.e) a.e[at + k] = x;
        a.x[at + k] = a.zeros ? 0.0f : x;
        if (a.before && a.list.step < 0) a.before[at + k] = a.x[at + k];
    }
    if (!a.before || a.list.step < 0) return;
    const tl_row& row = a.rows.row[number];
    const int loop = row.loop_begin + a.list.step;
    if (row.exit_threshold <= 0 || loop + 1 >= row.loop_end) return;
    const bool stops = settled(a, number, row.exit_threshold, room);
    for (int k = static_cast<int>(threadIdx.x); k < d; k += kThreads) a.before[at + k] = a.x[at + k];
    if (!stops) return;
    if (threadIdx.x == 0) a.rows.loops_run[number] = loop + 1;
    const CacheView& cache = a.rows.cache[row.cache];
    for (int later = loop + 1; later < row.loop_end; ++later)
        for (int layer = 0; layer < a.n_core; ++layer)
            copy_visit(cache, a.core.first + later * a.core.per_loop + layer,
                       a.core.first + loop * a.core.per_loop + layer, row.slot);
}

}  // namespace tinyloop::gpu
