// A product with many rows, bound by arithmetic. A block takes a tile of outputs and rows, and its warps a part of that
// each; weights and inputs, which other kernels have written down, come through shared memory, the next while the last
// are multiplied. A warp sums the slices of the inputs (fragments.h) one after another.
#pragma once
#include "inputs.h"
#include "outputs.h"

namespace tinyloop::gpu {

constexpr int kWide = kWarps > 1 ? 2 : 1, kTall = kWarps / kWide;  // warps of a block, along outputs and along rows

template <int kDtype, int kTiles>
struct ManyRows {
    static constexpr int kOutputTiles = kTiles, kRowTiles = 2;  // of a warp
    static constexpr int kRowsOfWarp = kRowTiles * kTileRows;
    static constexpr int kOutputs = kWide * kOutputTiles * kTileOutputs, kRows = kTall * kRowsOfWarp;
    // In shared memory, kDepth inputs of each row and weights of each output. Bytes from one to the next are
    // such that few lanes meet in a bank.
    static constexpr int kInputBytes = kDepth * 4 + 16;
    static constexpr int kWeightBytes = kDtype == TL_F32 ? kDepth * 4 + 16 : kDepth * 2;
    static constexpr int kStage = kRows * kInputBytes + kOutputs * kWeightBytes;
    static_assert(2 * kStage >= kRowsOfWarp * kOutputs * 4, "the outputs of a row of warps take their place");
};

template <int kDtype, int kTiles>
constexpr size_t many_rows_shared() {
    using Many = ManyRows<kDtype, kTiles>;
    return 2 * Many::kStage + sizeof(int) * (Many::kRows + Many::kOutputs);
}

// Inputs begin .. begin + kDepth - 1 of the block's rows and their weights for its outputs (rows of the matrix) are on
// their way to `stage`; zeros where there are none. Every thread copies 16 bytes of some of them.
template <int kDtype, int kTiles>
__device__ __forceinline__ void copy_stage(const Product& p, Copies& copies, const int* rows, const int* outputs,
                                           int begin, char* stage) {
    using Many = ManyRows<kDtype, kTiles>;
    constexpr int kSize = kDtype == TL_F32 ? 4 : 2, kOfRow = kDepth * 4 / 16, kOfOutput = kDepth * kSize / 16;
#pragma unroll
    for (int i = 0; i < Many::kRows * kOfRow / kThreads; ++i) {
        const int number = static_cast<int>(threadIdx.x) + i * kThreads, row = rows[number / kOfRow];
        const int k = begin + number % kOfRow * 4, left = p.inputs - k;
        const int count = row < 0 || left < 0 ? 0 : left < 4 ? left : 4;
        copies.add(stage + number / kOfRow * Many::kInputBytes + number % kOfRow * 16,
                   p.from + (count ? static_cast<size_t>(row) * p.from_width + k : 0), count * 4);
    }
    char* weights = stage + Many::kRows * Many::kInputBytes;
#pragma unroll
    for (int i = 0; i < Many::kOutputs * kOfOutput / kThreads; ++i) {
        const int number = static_cast<int>(threadIdx.x) + i * kThreads, output = outputs[number / kOfOutput];
        const int k = begin + number % kOfOutput * (16 / kSize);
        const bool some = output >= 0 && k < p.stride;
        copies.add(weights + number / kOfOutput * Many::kWeightBytes + number % kOfOutput * 16,
                   weights_of<kDtype>(p, output) + (some ? k * kSize : 0), some ? 16 : 0);
    }
    copies.close_group();
}

// p.input is plain, p.from_width a multiple of 4, p.span() at most kOutputs.
template <int kDtype, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles > 2 || kDtype == TL_F32 ? 1 : 2)
    many_rows(const __grid_constant__ Product p) {
    using Many = ManyRows<kDtype, kTiles>;
    TL_DYNAMIC_SHARED(char, shared);
    int* rows = reinterpret_cast<int*>(shared + 2 * Many::kStage);
    int* matrix_rows = rows + Many::kRows;  // of the block's outputs
    const int first = static_cast<int>(blockIdx.x) * Many::kRows;
    for (int r = static_cast<int>(threadIdx.x); r < Many::kRows; r += kThreads) rows[r] = p.list.row(p.rows, first + r);
    for (int o = static_cast<int>(threadIdx.x); o < Many::kOutputs; o += kThreads) matrix_rows[o] = matrix_row(p, o);
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, own = lane % 4 * 8;
    const int first_output = warp % kWide * Many::kOutputTiles * kTileOutputs;
    const int first_row = warp / kWide * Many::kRowsOfWarp;
    const Slices slices = slices_of(p.stride);
    float all[Many::kOutputTiles][Many::kRowTiles][4] = {}, sums[Many::kOutputTiles][Many::kRowTiles][4] = {};
    Copies copies;
    copy_stage<kDtype, kTiles>(p, copies, rows, matrix_rows, 0, shared);
    int of_slice = 0;
#pragma unroll 1
    for (int begin = 0, turn = 0; begin < p.stride; begin += kDepth, turn ^= 1) {
        if (begin + kDepth < p.stride) {
            copy_stage<kDtype, kTiles>(p, copies, rows, matrix_rows, begin + kDepth,
                                       shared + (turn ^ 1) * Many::kStage);
            copies.wait<1>();
        } else {
            copies.wait<0>();
        }
        __syncthreads();
        const char* stage = shared + turn * Many::kStage;
        const char* from = stage + Many::kRows * Many::kInputBytes + own * (kDtype == TL_F32 ? 4 : 2);
        Eight<kDtype> weights[Many::kOutputTiles][2];
#pragma unroll
        for (int o = 0; o < Many::kOutputTiles; ++o)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                weights[o][h].load(from + (first_output + o * kTileOutputs + h * 8 + group) * Many::kWeightBytes);
        const char* inputs = stage + (first_row + group) * Many::kInputBytes + own * 4;
        multiply_tiles<kDtype, Many::kOutputTiles, Many::kRowTiles>(
            sums, weights, reinterpret_cast<const float*>(inputs), kTileRows * Many::kInputBytes / 4);
        of_slice += kDepth;
        if (of_slice == slices.inputs || begin + kDepth >= p.stride) {
            of_slice = 0;
#pragma unroll
            for (int o = 0; o < Many::kOutputTiles; ++o)
#pragma unroll
                for (int r = 0; r < Many::kRowTiles; ++r)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        all[o][r][i] += sums[o][r][i];
                        sums[o][r][i] = 0;
                    }
        }
        __syncthreads();  // what was read of the stage
    }

    float* outputs = reinterpret_cast<float*>(shared);
#pragma unroll 1
    for (int begin = 0; begin < Many::kRows; begin += Many::kRowsOfWarp) {
        if (begin == first_row) {
#pragma unroll
            for (int o = 0; o < Many::kOutputTiles; ++o)
#pragma unroll
                for (int r = 0; r < Many::kRowTiles; ++r)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int output = first_output + o * kTileOutputs + i / 2 * 8 + group;
                        const int row = r * kTileRows + lane % 4 * 2 + i % 2;
                        if (output < p.span()) outputs[row * p.span() + output] = all[o][r][i];
                    }
        }
        __syncthreads();
        put(p, rows + begin, Many::kRowsOfWarp, first + begin, outputs);
        __syncthreads();
    }
}

}  // namespace tinyloop::gpu
