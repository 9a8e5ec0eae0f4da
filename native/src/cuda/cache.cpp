#include "cache.h"

#include <algorithm>
#include <new>

using namespace tinyloop::gpu;

namespace {

int capacity_of(const tl_cache_desc& shape, int max_rows) {
    const int64_t ring = static_cast<int64_t>(shape.window) + max_rows;
    return shape.window && ring < shape.positions ? static_cast<int>(ring) : shape.positions;
}

size_t slot_bytes_of(const tl_model_desc& desc, int mode) {
    if (mode >= TL_CACHE_H_FP16) return stored_bytes(mode, desc.d_model);
    return static_cast<size_t>(desc.head_dim) * (mode == TL_CACHE_FP16 ? 2 : 1);
}

int planes_of(const tl_model_desc& desc, int mode) { return mode >= TL_CACHE_H_FP16 ? 1 : 2 * desc.n_kv_heads; }

// A hostile config can ask for more than 64 bits count; that much is refused as memory, not wrapped around.
uint64_t product_of(std::initializer_list<uint64_t> factors) {
    unsigned __int128 total = 1;
    for (uint64_t factor : factors) total = std::min<unsigned __int128>(total * factor, uint64_t{1} << 61);
    return static_cast<uint64_t>(total);
}

struct Bytes {
    uint64_t data, scales, positions;

    Bytes(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows) {
        const uint64_t visits = static_cast<uint64_t>(desc.n_prelude + desc.n_coda) +
                                static_cast<uint64_t>(shape.loops) * static_cast<uint64_t>(desc.n_core);
        const auto slots = static_cast<uint64_t>(capacity_of(shape, max_rows));
        const auto planes = static_cast<uint64_t>(planes_of(desc, shape.mode));
        data = product_of({visits, planes, slots, slot_bytes_of(desc, shape.mode)});
        scales = shape.mode == TL_CACHE_INT8 ? product_of({visits, planes, slots, sizeof(float)}) : 0;
        positions = shape.mode >= TL_CACHE_H_FP16 ? slots * sizeof(int32_t) : 0;
    }
};

}  // namespace

tl_cache::tl_cache(std::shared_ptr<Device> device_, const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows)
    : device(std::move(device_)),
      mode(shape.mode),
      window(shape.window),
      capacity(capacity_of(shape, max_rows)),
      planes(planes_of(desc, shape.mode)),
      fixed_visits(desc.n_prelude + desc.n_coda),
      n_core(desc.n_core),
      n_visits(fixed_visits + shape.loops * desc.n_core),
      slot_bytes(slot_bytes_of(desc, shape.mode)) {
    const Bytes bytes(desc, shape, max_rows);
    data = Memory(*device, bytes.data, Use::lane);
    scales = Memory(*device, bytes.scales, Use::lane);
    positions = Memory(*device, bytes.positions, Use::lane);
    // A draft tree's row may span slots that no row has written: what they hold must be finite.
    for (const Memory* memory : {&data, &scales, &positions}) device->clear(memory->as<void>(), memory->bytes());
}

uint64_t tl_cache::bytes(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows) {
    const Bytes bytes(desc, shape, max_rows);
    return bytes.data + bytes.scales + bytes.positions;
}

CacheView tl_cache::view() const {
    return {
        mode,    window, capacity, planes, slot_bytes, data.as<uint8_t>(), scales.as<float>(), positions.as<int32_t>(),
        nullptr, 0};
}

void tl_cache::copy_from(const tl_cache& other, int slots, int loops) {
    const size_t count = static_cast<size_t>(std::min({window ? capacity : slots, capacity, other.capacity}));
    const size_t rows = static_cast<size_t>(fixed_visits + loops * n_core) * static_cast<size_t>(planes);
    const auto mine = static_cast<size_t>(capacity), theirs = static_cast<size_t>(other.capacity);
    if (!count || !rows) return;
    device->copy(data.as<void>(), mine * slot_bytes, other.data.as<void>(), theirs * slot_bytes, count * slot_bytes,
                 rows);
    if (scales.bytes())
        device->copy(scales.as<void>(), mine * sizeof(float), other.scales.as<void>(), theirs * sizeof(float),
                     count * sizeof(float), rows);
    if (positions.bytes())
        device->copy(positions.as<void>(), count * sizeof(int32_t), other.positions.as<void>(), count * sizeof(int32_t),
                     count * sizeof(int32_t), 1);
}

void tl_cache::move(int to_slot, int from_slot) {
    const auto to = static_cast<size_t>(window ? to_slot % capacity : to_slot);
    const auto from = static_cast<size_t>(window ? from_slot % capacity : from_slot);
    if (to == from) return;
    const auto slots = static_cast<size_t>(capacity),
               rows = static_cast<size_t>(n_visits) * static_cast<size_t>(planes);
    const auto move_in = [&](const Memory& memory, size_t size, size_t runs) {
        char* start = memory.as<char>();
        device->copy(start + to * size, slots * size, start + from * size, slots * size, size, runs);
    };
    move_in(data, slot_bytes, rows);
    if (scales.bytes()) move_in(scales, sizeof(float), rows);
    if (positions.bytes()) move_in(positions, sizeof(int32_t), 1);
}

tl_states::tl_states(std::shared_ptr<Device> device_, int count, int width)
    : device(std::move(device_)),
      core(*device, sizeof(float) * static_cast<size_t>(count) * static_cast<size_t>(width), Use::lane),
      prelude(*device, core.bytes(), Use::lane) {}
