#include "cache.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "slot_panel.h"

using namespace tinyloop::cpu;

namespace {

Stored stored_kind(int mode) {
    return mode == TL_CACHE_H_FP16 ? Stored::fp16 : mode == TL_CACHE_H_INT8 ? Stored::int8 : Stored::int4;
}

int capacity_of(const tl_cache_desc& shape, int max_rows) {
    const int64_t ring = (static_cast<int64_t>(shape.window) + max_rows + 15) & ~int64_t{15};
    const int whole = pad16(shape.positions);
    return shape.window && ring < whole ? static_cast<int>(ring) : whole;
}

size_t input_bytes_of(const tl_model_desc& desc, int mode) {
    return mode >= TL_CACHE_H_FP16 ? stored_bytes(stored_kind(mode), desc.d_model) : 0;
}

size_t visit_bytes_of(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows) {
    const size_t slots = static_cast<size_t>(capacity_of(shape, max_rows)),
                 hd = static_cast<size_t>(pad16(desc.head_dim));
    const size_t kv = static_cast<size_t>(desc.n_kv_heads);
    if (shape.mode >= TL_CACHE_H_FP16) return slots * input_bytes_of(desc, shape.mode);
    return shape.mode == TL_CACHE_INT8 ? kv * 2 * slots * (hd + sizeof(float)) : kv * 2 * slots * hd * 2;
}

int fixed_of(const tl_model_desc& desc) { return desc.n_prelude + desc.n_coda; }

}  // namespace

tl_cache::tl_cache(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows)
    : mode(shape.mode),
      window(shape.window),
      capacity(capacity_of(shape, max_rows)),
      head_dim(pad16(desc.head_dim)),
      n_kv_heads(desc.n_kv_heads),
      d_model(desc.d_model),
      n_visits(fixed_of(desc) + shape.loops * desc.n_core),
      fixed_visits(fixed_of(desc)),
      n_core(desc.n_core),
      input_bytes(input_bytes_of(desc, shape.mode)),
      visit_bytes(visit_bytes_of(desc, shape, max_rows)),
      storage(bytes(desc, shape, max_rows) - (holds_inputs() ? sizeof(int32_t) * static_cast<size_t>(capacity) : 0)),
      positions(holds_inputs() ? sizeof(int32_t) * static_cast<size_t>(capacity) : 0) {}

uint64_t tl_cache::bytes(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows) {
    // A hostile config can ask for more than 64 bits count; that much is refused as memory, not wrapped around.
    const unsigned __int128 visits = fixed_of(desc) + static_cast<unsigned __int128>(shape.loops) * desc.n_core;
    const uint64_t slots = static_cast<uint64_t>(capacity_of(shape, max_rows));
    const unsigned __int128 total =
        visits * visit_bytes_of(desc, shape, max_rows) + (shape.mode >= TL_CACHE_H_FP16 ? slots * sizeof(int32_t) : 0);
    return total > (uint64_t{1} << 62) ? uint64_t{1} << 62 : static_cast<uint64_t>(total);
}

size_t tl_cache::head_bytes() const { return static_cast<size_t>(capacity) * head_dim * cached_bytes(dtype()); }

char* tl_cache::keys(int visit, int kv_head) const {
    return storage.as<char>() + static_cast<size_t>(visit) * visit_bytes +
           2 * static_cast<size_t>(kv_head) * head_bytes();
}

float* tl_cache::key_scales(int visit, int kv_head) const {
    char* after_heads = keys(visit, n_kv_heads);
    return reinterpret_cast<float*>(after_heads) + 2 * static_cast<size_t>(kv_head) * capacity;
}

SlotPanel tl_cache::panel(int visit, int kv_head, int slot) const {
    const size_t first = static_cast<size_t>(at(slot) / kPanel * kPanel);
    char* const panel_keys = keys(visit, kv_head) + first * head_dim * cached_bytes(dtype());
    if (!quantized()) return {panel_keys, panel_keys + head_bytes()};
    float* const scales = key_scales(visit, kv_head) + first;
    return {panel_keys, panel_keys + head_bytes(), scales, scales + capacity};
}

void tl_cache::append_key(int visit, int kv_head, int slot, const float* key, const Kernels& kernels) const {
    const SlotPanel to = panel(visit, kv_head, slot);
    const int s = slot % kPanel;
    if (!quantized()) {
        kernels.store_fp16(key, head_dim, reinterpret_cast<uint16_t*>(to.keys) + key_at(TL_F16, s, 0), kPanel);
        return;
    }
    int8_t small[1024];
    to.key_scales[s] = kernels.store_int8(key, head_dim, small);
    for (int k = 0; k < head_dim; k += 2) std::memcpy(to.keys + key_at(kInt8, s, k), small + k, 2);
}

void tl_cache::append_value(int visit, int kv_head, int slot, const float* value, const Kernels& kernels) const {
    const SlotPanel to = panel(visit, kv_head, slot);
    const int s = slot % kPanel;
    if (!quantized()) {
        for (int k = 0; k < head_dim; k += kPanel)
            kernels.store_fp16(value + k, kPanel, reinterpret_cast<uint16_t*>(to.values) + value_at(TL_F16, s, k), 1);
        return;
    }
    int8_t small[1024];
    to.value_scales[s] = kernels.store_int8(value, head_dim, small);
    for (int k = 0; k < head_dim; ++k) to.values[value_at(kInt8, s, k)] = small[k];
}

void tl_cache::append_input(int visit, int slot, int position_, const float* x) const {
    position(slot) = position_;
    store(stored(), x, d_model, input(visit, slot));
}

Stored tl_cache::stored() const { return stored_kind(mode); }

void tl_cache::copy_from(const tl_cache& other, int slots, int loops) {
    const int visits = fixed_visits + loops * n_core;
    const int held = window ? std::min(capacity, other.capacity) : pad16(slots);  // a ring: whatever of it exists
    const size_t count = static_cast<size_t>(held);
    for (int visit = 0; visit < visits; ++visit) {
        if (holds_inputs()) {
            std::memcpy(data() + static_cast<size_t>(visit) * visit_bytes,
                        other.data() + static_cast<size_t>(visit) * other.visit_bytes, count * input_bytes);
            continue;
        }
        const size_t bytes = count * head_dim * cached_bytes(dtype());
        for (int head = 0; head < n_kv_heads; ++head) {
            const SlotPanel to = panel(visit, head, 0), from = other.panel(visit, head, 0);
            std::memcpy(to.keys, from.keys, bytes);
            std::memcpy(to.values, from.values, bytes);
            if (!quantized()) continue;
            std::memcpy(to.key_scales, from.key_scales, count * sizeof(float));
            std::memcpy(to.value_scales, from.value_scales, count * sizeof(float));
        }
    }
    if (holds_inputs()) std::memcpy(positions.as<char>(), other.positions.as<char>(), count * sizeof(int32_t));
}

void tl_cache::move(int to_slot, int from_slot) {
    if (to_slot == from_slot) return;
    for (int visit = 0; visit < n_visits; ++visit) copy_slot(visit, to_slot, visit, from_slot);
    if (holds_inputs()) position(to_slot) = position(from_slot);
}

void tl_cache::copy_visit(int to, int from, int slot) const { copy_slot(to, slot, from, slot); }

void tl_cache::copy_slot(int to_visit, int to_slot, int from_visit, int from_slot) const {
    if (holds_inputs()) {
        std::memcpy(input(to_visit, to_slot), input(from_visit, from_slot), input_bytes);
        return;
    }
    for (int head = 0; head < n_kv_heads; ++head)
        tinyloop::cpu::copy_slot(dtype(), head_dim, panel(from_visit, head, from_slot), from_slot % kPanel,
                                 panel(to_visit, head, to_slot), to_slot % kPanel);
}

tl_states::tl_states(int count, int stride_)
    : stride(stride_),
      core(static_cast<size_t>(count) * stride_ * sizeof(float)),
      prelude(static_cast<size_t>(count) * stride_ * sizeof(float)) {}
