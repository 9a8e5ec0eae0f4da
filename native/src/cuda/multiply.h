// Which kernel a product takes, by its shape and the number of rows, and how its outputs are cut into blocks. Speed
// alone decides: all of them give a row the same bits.
#pragma once
#include <algorithm>

#include "few_rows.h"
#include "many_rows.h"

namespace tinyloop::gpu {

constexpr size_t kMostShared = 99 << 10;  // bytes of shared memory that every device gives a block
constexpr int kManyRows = kThreads / 4;   // products with so many are many_rows()'s
constexpr int kBlocksToFill = 128;        // a device's multiprocessors, or most of them
// Inputs that the blocks of a product would make all together, from where on a kernel makes them once instead.
constexpr int64_t kMostMade = 1 << 20;

inline unsigned blocks(int count, int per_block) { return static_cast<unsigned>((count + per_block - 1) / per_block); }

// Tiles of rows that a block of few_rows() takes: the more rows, the more share a matrix's bytes.
inline int row_tiles(int rows, int span) {
    return rows > kTileRows && few_rows_shared<TL_F16, 4, 2>(span) <= kMostShared ? 4 : 1;
}

// Gives every block `room` outputs: of heads as many as fit, of a gated product at least a tile of each matrix.
inline void cut_outputs(Product& p, int room) {
    const bool heads = p.output == Output::heads || p.output == Output::kept, gated = p.output == Output::gated;
    p.width = heads ? p.shape.head_dim : gated ? std::max(room / 2, kTileOutputs) : room;
    p.pitch = padded(p.width, kTileOutputs);
    p.units = gated ? 2 : std::max(1, room / p.pitch);
}

inline int blocks_of_outputs(const Product& p) {
    return static_cast<int>(blocks(p.outputs, p.output == Output::gated ? p.width : p.units * p.width));
}

// A kernel by the tiles of rows and of outputs that its blocks (few_rows) or warps (many_rows) take.
struct Way {
    bool many;
    int rows, outputs;
};

// Also cuts the outputs. Where there are enough blocks all the same, they are large: less is read twice.
template <int kDtype>
Way way_of(Product& p, int rows) {
    Way way{};
    if (rows >= kManyRows && p.input != Input::stored) {
        for (const int tiles : {2, 4}) {
            const int room = kWide * tiles * kTileOutputs;
            cut_outputs(p, room);
            if (p.span() > room || (tiles == 4 && kDtype == TL_F32)) continue;
            const int all = static_cast<int>(blocks(rows, ManyRows<kDtype, 2>::kRows)) * blocks_of_outputs(p);
            if (!way.many || all >= kBlocksToFill) way = {true, 2, tiles};
        }
        if (way.many) {
            cut_outputs(p, kWide * way.outputs * kTileOutputs);
            return way;
        }
    }
    cut_outputs(p, kTileOutputs);
    way.rows = row_tiles(rows, p.span());
    const int narrow = kDtype == TL_F32 || way.rows == 1 ? 1 : 2, wide = kDtype == TL_F32 ? 1 : 2 * narrow;
    cut_outputs(p, narrow * kTileOutputs);
    const int most = blocks_of_outputs(p);
    cut_outputs(p, wide * kTileOutputs);
    const int least = blocks_of_outputs(p);
    const bool fits = way.rows == 1 || few_rows_shared<TL_F16, 4, 4>(p.span()) <= kMostShared;
    way.outputs = fits && (least == most || least >= kBlocksToFill) ? wide : narrow;
    cut_outputs(p, way.outputs * kTileOutputs);
    return way;
}

template <int kDtype, int kRowTiles, int kPassTiles>
void launch_few(Device& device, const Product& p, int rows) {
    const auto grid = dim3(blocks(rows, kRowTiles * kTileRows), static_cast<unsigned>(blocks_of_outputs(p)));
    launch(device, grid, kThreads, few_rows_shared<kDtype, kRowTiles, kPassTiles>(p.span()),
           few_rows<kDtype, kRowTiles, kPassTiles>, p);
}

template <int kDtype, int kTiles>
void launch_many(Device& device, const Product& p, int rows) {
    const auto grid = dim3(blocks(rows, ManyRows<kDtype, kTiles>::kRows), static_cast<unsigned>(blocks_of_outputs(p)));
    launch(device, grid, kThreads, many_rows_shared<kDtype, kTiles>(), many_rows<kDtype, kTiles>, p);
}

template <int kDtype>
void launch_product(Device& device, Product p, int rows) {
    const Way way = way_of<kDtype>(p, rows);
    const int64_t made = int64_t{rows} * p.inputs * blocks_of_outputs(p);
    if (p.input != Input::plain && p.input != Input::stored && (way.many || made > kMostMade)) {
        launch(device, dim3(static_cast<unsigned>(rows)), kThreads, prepare_shared(), prepare, p);
        p.input = Input::plain;
        p.from = p.prepared;
        p.from_width = p.prepared_width;
    }
    if constexpr (kDtype == TL_F32) {
        if (way.many) return launch_many<kDtype, 2>(device, p, rows);
        return way.rows == 1 ? launch_few<kDtype, 1, 1>(device, p, rows) : launch_few<kDtype, 4, 1>(device, p, rows);
    } else {
        if (way.many)
            return way.outputs == 2 ? launch_many<kDtype, 2>(device, p, rows) : launch_many<kDtype, 4>(device, p, rows);
        if (way.rows == 1)
            return way.outputs == 1 ? launch_few<kDtype, 1, 1>(device, p, rows)
                                    : launch_few<kDtype, 1, 2>(device, p, rows);
        return way.outputs == 2 ? launch_few<kDtype, 4, 2>(device, p, rows) : launch_few<kDtype, 4, 4>(device, p, rows);
    }
}

inline void launch_product(Device& device, const Product& p, int rows, int dtype) {
    switch (dtype) {
        case TL_F16:
            return launch_product<TL_F16>(device, p, rows);
        case TL_BF16:
            return launch_product<TL_BF16>(device, p, rows);
        default:
            return launch_product<TL_F32>(device, p, rows);
    }
}

// Stored slots that a block takes the keys and values of.
inline int tile_slots(int head_dim) { return kTileRows * row_tiles(4 * kTileRows, padded(head_dim, kTileOutputs)); }

}  // namespace tinyloop::gpu
