// A product with few rows, bound by the bytes of the matrix. Each warp takes one of the slices of the inputs (see
// fragments.h) for the same outputs, and the slices' sums meet in shared memory. The block makes its input rows itself,
// some of each slice at a time.
#pragma once
#include "inputs.h"
#include "outputs.h"

namespace tinyloop::gpu {

static_assert(kSlices % kWarps == 0, "every warp takes as many slices");
constexpr int kSlicesOfWarp = kSlices / kWarps;

template <int kDtype, int kRowTiles, int kPassTiles>
struct FewRows {  // kPassTiles: tiles of outputs that a warp takes at once
    static constexpr int kRows = kRowTiles * kTileRows;
    static constexpr int kOutputs = kPassTiles * kTileOutputs;
    static constexpr int kPiece = kRowTiles == 1 ? 128 / kPassTiles : 32;  // inputs of each slice at a time
    // Two more floats from one row to the next: 16 lanes that read 8 bytes each then find 32 banks.
    static constexpr int kPitch = kSlices * kPiece + 2;
    // Shared memory: input rows, and the sums of the slices, [slice][output][row]; in the same place where it is
    // scarce.
    static constexpr bool kKeepsInputs = kRowTiles == 1;
    static constexpr int kInputs = kRows * kPitch, kSums = kSlices * kOutputs * kRows;
    static constexpr int kFloats = kKeepsInputs ? kInputs + kSums : kInputs > kSums ? kInputs : kSums;
    static_assert(kFloats >= kRows * kThreads, "room for find_factor()");
};

template <int kDtype, int kRowTiles, int kPassTiles>
constexpr size_t few_rows_shared(int span) {
    using Few = FewRows<kDtype, kRowTiles, kPassTiles>;
    return sizeof(float) * (Few::kFloats + static_cast<size_t>(Few::kRows) * static_cast<size_t>(span)) +
           sizeof(Tile<Few::kRows>);
}

// Makes inputs begin .. begin + kPiece - 1 of every slice, of all rows; zeros where there is none. Rows that are none
// stay so.
template <int kDtype, int kRowTiles, int kPassTiles>
__device__ __forceinline__ void fill(const Product& p, const Tile<kRowTiles * kTileRows>& tile, const Slices& slices,
                                     float* inputs, int begin, bool write_down) {
    using Few = FewRows<kDtype, kRowTiles, kPassTiles>;
#pragma unroll 1
    for (int r = 0; r < Few::kRows; ++r) {
        if (tile.row[r] < 0 && begin > 0) continue;
        for (int i = static_cast<int>(threadIdx.x); i < kSlices * Few::kPiece; i += kThreads) {
            const int of_slice = begin + i % Few::kPiece, k = i / Few::kPiece * slices.inputs + of_slice;
            const bool some = tile.row[r] >= 0 && of_slice < slices.inputs && k < p.inputs;
            inputs[r * Few::kPitch + i] = some ? input_at<Few::kRows>(p, tile, r, k) : 0.0f;
            if (some && write_down) resolve<Few::kRows>(p, tile, r, k);
        }
    }
}

// Some outputs of the block, from number `pass` on, for all of its rows.
template <int kDtype, int kRowTiles, int kPassTiles>
__device__ __forceinline__ void multiply_few(const Product& p, const Tile<kRowTiles * kTileRows>& tile, int pass,
                                             float* room, float* outputs) {
    using Few = FewRows<kDtype, kRowTiles, kPassTiles>;
    constexpr int kAtOnce = Few::kPiece / kDepth, kBytes = kDtype == TL_F32 ? 4 : 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, own = lane % 4 * 8;
    const Slices slices = slices_of(p.stride);
    const bool write_down = p.input == Input::residual && p.resolved && blockIdx.y == 0 && pass == 0;
    const char* from[kPassTiles][2];
#pragma unroll
    for (int o = 0; o < kPassTiles; ++o)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            from[o][h] = weights_of<kDtype>(p, matrix_row(p, pass + o * kTileOutputs + h * 8 + group));
    float sums[kSlicesOfWarp][kPassTiles][kRowTiles][4] = {};
    for (int begin = 0; begin < slices.inputs; begin += Few::kPiece) {
        // Weights are asked for first, so that the inputs are made while they come.
        Eight<kDtype> weights[kSlicesOfWarp][kAtOnce][kPassTiles][2];
#pragma unroll
        for (int s = 0; s < kSlicesOfWarp; ++s)
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int of_slice = begin + i * kDepth;
                const int k = (warp + s * kWarps) * slices.inputs + of_slice + own;
                const bool some = of_slice < slices.inputs && k < p.stride;
#pragma unroll
                for (int o = 0; o < kPassTiles; ++o)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        if (some)
                            weights[s][i][o][h].load(from[o][h] + static_cast<size_t>(k) * kBytes);
                        else
                            weights[s][i][o][h].clear();
            }
        if (pass == 0 || !Few::kKeepsInputs || slices.inputs > Few::kPiece) {
            __syncthreads();  // what was read of the piece before, or of the sums
            fill<kDtype, kRowTiles, kPassTiles>(p, tile, slices, room, begin, write_down);
            __syncthreads();
        }
#pragma unroll
        for (int s = 0; s < kSlicesOfWarp; ++s)
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (begin + i * kDepth >= slices.inputs || warp + s * kWarps >= slices.count) continue;
                multiply_tiles<kDtype, kPassTiles, kRowTiles>(
                    sums[s], weights[s][i],
                    room + group * Few::kPitch + (warp + s * kWarps) * Few::kPiece + i * kDepth + own,
                    kTileRows * Few::kPitch);
            }
    }
    float* slice_sums = room + (Few::kKeepsInputs ? Few::kInputs : 0);
    __syncthreads();  // what was read of the inputs, or of the sums before
#pragma unroll
    for (int s = 0; s < kSlicesOfWarp; ++s)
#pragma unroll
        for (int o = 0; o < kPassTiles; ++o)
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int output = (warp + s * kWarps) * Few::kOutputs + o * kTileOutputs + h * 8 + group;
                    float* to = slice_sums + output * Few::kRows + r * kTileRows + lane % 4 * 2;
                    *reinterpret_cast<float2*>(to) = {sums[s][o][r][2 * h], sums[s][o][r][2 * h + 1]};
                }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < Few::kOutputs * Few::kRows; i += kThreads) {
        const int o = pass + i / Few::kRows, r = i % Few::kRows;
        if (o >= p.span()) continue;
        float sum = 0;
        for (int s = 0; s < slices.count; ++s) sum += slice_sums[s * Few::kOutputs * Few::kRows + i];
        outputs[r * p.span() + o] = sum;
    }
}

template <int kDtype, int kRowTiles, int kPassTiles>
__global__ void __launch_bounds__(kThreads, kRowTiles* kPassTiles > (kDtype == TL_F32 ? 2 : 8) ? 1 : 2)
    few_rows(const __grid_constant__ Product p) {
    using Few = FewRows<kDtype, kRowTiles, kPassTiles>;
    TL_DYNAMIC_SHARED(float, room);
    float* outputs = room + Few::kFloats;
    Tile<Few::kRows>& tile = *reinterpret_cast<Tile<Few::kRows>*>(outputs + Few::kRows * p.span());
    if (!find_rows<Few::kRows>(p, tile)) return;
    find_factors<Few::kRows>(p, tile, room);
#pragma unroll 1
    for (int pass = 0; pass < p.span(); pass += Few::kOutputs)
        multiply_few<kDtype, kRowTiles, kPassTiles>(p, tile, pass, room, outputs);
    __syncthreads();
    if (p.input == Input::residual && p.output == Output::heads && blockIdx.y == 0) append_inputs<Few::kRows>(p, tile);
    put(p, tile.row, Few::kRows, static_cast<int>(blockIdx.x) * Few::kRows, outputs);
}

}  // namespace tinyloop::gpu
