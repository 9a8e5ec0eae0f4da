// One lane's cache: what each layer visit stored of each slot. Knows the layouts; computes no attention.
//
// Layer visits are numbered: prelude layers, coda layers, then (loop, core layer), so that a cache of more loops starts
// like one of fewer. Key/value modes hold, per visit and key head, all panels of keys and then all panels of values (16
// slots each, spans.h); int8 adds a scale per slot for each. The "h" modes hold the layer's normed input of each slot
// (quantize.h) and each slot's position, for the rotary embedding when it is projected. With a window the slots are a
// ring: slot s lives at s modulo the capacity, which is a multiple of 16.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "memory.h"
#include "quantize.h"
#include "tinyloop/backend.h"

struct tl_cache {
    tl_cache(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows);
    static uint64_t bytes(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows);

    bool holds_inputs() const { return mode >= TL_CACHE_H_FP16; }
    bool quantized() const { return mode == TL_CACHE_INT8; }
    int at(int slot) const { return window ? slot % capacity : slot; }
    // The first slot that a row at `slot` may see.
    int first_seen(int slot) const { return window && slot >= window ? slot - window + 1 : 0; }

    int dtype() const { return quantized() ? tinyloop::cpu::kInt8 : static_cast<int>(TL_F16); }  // of keys and values
    // The panel that holds `slot`.
    tinyloop::cpu::SlotPanel panel(int visit, int kv_head, int slot) const;
    uint8_t* input(int visit, int slot) const {
        return data() + visit * visit_bytes + static_cast<size_t>(at(slot)) * input_bytes;
    }
    int32_t& position(int slot) const { return positions.as<int32_t>()[at(slot)]; }

    tinyloop::cpu::Stored stored() const;  // in the "h" modes

    void append_key(int visit, int kv_head, int slot, const float* key, const tinyloop::cpu::Kernels& kernels) const;
    void append_value(int visit, int kv_head, int slot, const float* value,
                      const tinyloop::cpu::Kernels& kernels) const;
    void append_input(int visit, int slot, int position, const float* x) const;

    void copy_from(const tl_cache& other, int slots, int loops);
    void move(int to_slot, int from_slot);
    // Gives `slot` in the visit of `to` what the visit of `from` holds there.
    void copy_visit(int to, int from, int slot) const;

    const int mode;  // tl_cache_mode
    const int window;
    const int capacity;  // slots, a multiple of 16
    const int head_dim;  // padded to 16
    const int n_kv_heads;
    const int d_model;
    const int n_visits, fixed_visits, n_core;  // fixed: prelude and coda layers
    const size_t input_bytes;                  // of one stored input; 0 in the key/value modes
    const size_t visit_bytes;
    tinyloop::cpu::Buffer storage, positions;

  private:
    size_t head_bytes() const;  // of all panels of one key head's keys, or values
    char* keys(int visit, int kv_head) const;
    float* key_scales(int visit, int kv_head) const;  // (capacity), then the values'; int8 only
    uint8_t* data() const { return storage.as<uint8_t>(); }
    void copy_slot(int to_visit, int to_slot, int from_visit, int from_slot) const;
};

struct tl_states {
    tl_states(int count, int stride);
    const int stride;                     // floats per vector
    tinyloop::cpu::Buffer core, prelude;  // (count, stride)
};
