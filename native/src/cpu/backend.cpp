// The CPU backend's table of the C ABI: translates exceptions to status codes, nothing else.
#include <cstdio>
#include <new>

#include "forward.h"

namespace {

template <class F>
int guarded(tl_status* status, F f) {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        std::snprintf(status->message, sizeof status->message, "out of memory");
        return TL_NO_MEMORY;
    } catch (const std::exception& error) {
        std::snprintf(status->message, sizeof status->message, "%s", error.what());
        return TL_FAILED;
    }
}

int32_t device_count(tl_status*) { return 1; }
int device_info(int32_t, tl_device_info* out, tl_status*) {
    *out = {};
    std::snprintf(out->name, sizeof out->name, "this machine's processor");
    return TL_OK;
}

int model_create(const tl_model_desc* desc, const tl_options* options, tl_model** out, tl_status* status) {
    return guarded(status, [&] {
        *out = new tl_model(*desc, *options);
        return TL_OK;
    });
}
void model_destroy(tl_model* model) { delete model; }
uint64_t model_bytes(const tl_model* model) { return model->bytes(); }
int64_t free_bytes(const tl_model*) { return -1; }
const char* model_level(const tl_model* model) { return model->kernels->name; }
uint64_t steps(const tl_model* model) { return model->steps.load(std::memory_order_relaxed); }

int cache_create(tl_model* model, const tl_cache_desc* shape, tl_cache** out, tl_status* status) {
    return guarded(status, [&] {
        *out = new tl_cache(model->desc, *shape, model->max_rows());
        return TL_OK;
    });
}
void cache_destroy(tl_cache* cache) { delete cache; }
uint64_t cache_bytes(const tl_model* model, const tl_cache_desc* shape) {
    return tl_cache::bytes(model->desc, *shape, model->max_rows());
}

int states_create(tl_model* model, int32_t count, tl_states** out, tl_status* status) {
    return guarded(status, [&] {
        *out = new tl_states(count, tinyloop::cpu::pad16(model->desc.d_model));
        return TL_OK;
    });
}
void states_destroy(tl_states* states) { delete states; }

uint64_t states_bytes(const tl_model* model, int32_t count) {
    return uint64_t(count) * tinyloop::cpu::pad16(model->desc.d_model) * 2 * sizeof(float);
}

int cache_copy(tl_model*, tl_cache* to, const tl_cache* from, int32_t slots, int32_t loops, tl_status*) {
    to->copy_from(*from, slots, loops);
    return TL_OK;
}
int cache_move(tl_model*, tl_cache* cache, int32_t to_slot, int32_t from_slot, tl_status*) {
    cache->move(to_slot, from_slot);
    return TL_OK;
}

int forward(tl_model* model, tl_cache* const* caches, int32_t, tl_states* states, const tl_row* rows, int32_t n_rows,
            float* logits, tl_rank*, int32_t* loops_run, tl_status* status) {
    return guarded(status, [&] {
        model->forward(caches, states, rows, n_rows, logits, loops_run);
        return TL_OK;
    });
}

constexpr tl_backend kTable = {
    .abi = TL_BACKEND_ABI,
    .size = sizeof(tl_backend),
    .name = "cpu",
    .most_best = 0,
    .device_count = device_count,
    .device_info = device_info,
    .model_create = model_create,
    .model_destroy = model_destroy,
    .model_bytes = model_bytes,
    .free_bytes = free_bytes,
    .model_level = model_level,
    .steps = steps,
    .cache_create = cache_create,
    .cache_destroy = cache_destroy,
    .cache_bytes = cache_bytes,
    .states_create = states_create,
    .states_destroy = states_destroy,
    .states_bytes = states_bytes,
    .cache_copy = cache_copy,
    .cache_move = cache_move,
    .forward = forward,
};

}  // namespace

const tl_backend* tl_cpu_backend(void) { return &kTable; }
