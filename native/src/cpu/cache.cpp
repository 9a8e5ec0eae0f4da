#include "cache.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

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

char* tl_cache::keys(int visit, int kv_head) const {
    const size_t head_bytes = 2 * static_cast<size_t>(capacity) * head_dim * element_bytes();
    return storage.as<char>() + static_cast<size_t>(visit) * visit_bytes + static_cast<size_t>(kv_head) * head_bytes;
}

float* tl_cache::key_scales(int visit, int kv_head) const {
    char* after_heads = keys(visit, n_kv_heads);
    return reinterpret_cast<float*>(after_heads) + 2 * static_cast<size_t>(kv_head) * capacity;
}

void tl_cache::append_key(int visit, int kv_head, int slot, const float* key, const Kernels& kernels) const {
    const size_t s = static_cast<size_t>(at(slot));
    const size_t offset = s / kPanel * head_dim * kPanel + s % kPanel;
    if (quantized())
        key_scales(visit, kv_head)[s] =
            quantize_int8(key, head_dim, reinterpret_cast<int8_t*>(keys(visit, kv_head)) + offset, kPanel);
    else
        kernels.store_fp16(key, head_dim, reinterpret_cast<uint16_t*>(keys(visit, kv_head)) + offset, kPanel);
}

void tl_cache::append_value(int visit, int kv_head, int slot, const float* value, const Kernels& kernels) const {
    const size_t s = static_cast<size_t>(at(slot));
    int8_t small[1024];
    if (quantized()) value_scales(visit, kv_head)[s] = quantize_int8(value, head_dim, small, 1);
    for (int k = 0; k < head_dim; k += kPanel) {
        const size_t offset = static_cast<size_t>(k) * capacity + s * kPanel;
        if (quantized())
            std::memcpy(values(visit, kv_head) + offset, small + k, kPanel);
        else
            kernels.store_fp16(value + k, kPanel, reinterpret_cast<uint16_t*>(values(visit, kv_head)) + offset, 1);
    }
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
        const size_t size = element_bytes();
        for (int head = 0; head < n_kv_heads; ++head) {
            std::memcpy(keys(visit, head), other.keys(visit, head), count * head_dim * size);
            for (int k = 0; k < head_dim; k += kPanel)
                std::memcpy(values(visit, head) + static_cast<size_t>(k) * capacity * size,
                            other.values(visit, head) + static_cast<size_t>(k) * other.capacity * size,
                            count * kPanel * size);
            if (!quantized()) continue;
            std::memcpy(key_scales(visit, head), other.key_scales(visit, head), count * sizeof(float));
            std::memcpy(value_scales(visit, head), other.value_scales(visit, head), count * sizeof(float));
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
    const size_t size = element_bytes(), to = static_cast<size_t>(at(to_slot)),
                 from = static_cast<size_t>(at(from_slot));
    for (int head = 0; head < n_kv_heads; ++head) {
        char *to_keys = keys(to_visit, head), *from_keys = keys(from_visit, head);
        for (int k = 0; k < head_dim; ++k)
            std::memcpy(to_keys + ((to / kPanel * head_dim + k) * kPanel + to % kPanel) * size,
                        from_keys + ((from / kPanel * head_dim + k) * kPanel + from % kPanel) * size, size);
        for (int k = 0; k < head_dim; k += kPanel)
            std::memcpy(values(to_visit, head) + (static_cast<size_t>(k) * capacity + to * kPanel) * size,
                        values(from_visit, head) + (static_cast<size_t>(k) * capacity + from * kPanel) * size,
                        kPanel * size);
        if (!quantized()) continue;
        key_scales(to_visit, head)[to] = key_scales(from_visit, head)[from];
        value_scales(to_visit, head)[to] = value_scales(from_visit, head)[from];
    }
}

tl_states::tl_states(int count, int stride_)
    : stride(stride_),
      core(static_cast<size_t>(count) * stride_ * sizeof(float)),
      prelude(static_cast<size_t>(count) * stride_ * sizeof(float)) {}
