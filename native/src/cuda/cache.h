// A lane's cache and saved states in device memory. Knows the layout (call.h, CacheView); computes nothing.
#pragma once
#include <memory>

#include "call.h"

struct tl_cache {
    // Throws std::bad_alloc.
    tl_cache(std::shared_ptr<tinyloop::gpu::Device> device, const tl_model_desc& desc, const tl_cache_desc& shape,
             int max_rows);
    static uint64_t bytes(const tl_model_desc& desc, const tl_cache_desc& shape, int max_rows);

    tinyloop::gpu::CacheView view() const;
    void copy_from(const tl_cache& other, int slots, int loops);
    void move(int to_slot, int from_slot);

    const std::shared_ptr<tinyloop::gpu::Device> device;  // it may outlive the model
    const int mode, window, capacity;                     // capacity: slots
    const int planes;                                     // that a visit has: 2 * n_kv_heads, or 1 of inputs
    const int fixed_visits, n_core, n_visits;
    const size_t slot_bytes;
    tinyloop::gpu::Memory data, scales, positions;
};

struct tl_states {
    tl_states(std::shared_ptr<tinyloop::gpu::Device> device, int count, int width);
    const std::shared_ptr<tinyloop::gpu::Device> device;
    tinyloop::gpu::Memory core, prelude;  // (count, width)
};
