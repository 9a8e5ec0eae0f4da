// The plug-in's table of the C ABI: translates exceptions to status codes, nothing else.
#include <cstdio>
#include <new>

#include "forward.h"

using namespace tinyloop::gpu;

namespace {

template <class F>
int guarded(tl_status* status, F f) {
    const auto say = [status](const char* what) { std::snprintf(status->message, sizeof status->message, "%s", what); };
    try {
        f();
        return TL_OK;
    } catch (const std::bad_alloc&) {
        say("out of device memory");
        return TL_NO_MEMORY;
    } catch (const Unavailable& error) {
        say(error.what());
        return TL_UNAVAILABLE;
    } catch (const std::exception& error) {
        say(error.what());
        return TL_FAILED;
    }
}

int32_t device_count(tl_status* status) {
    std::string reason;
    const int count = Device::count(reason);
    std::snprintf(status->message, sizeof status->message, "%s", reason.c_str());
    return count;
}

int device_info(int32_t device, tl_device_info* out, tl_status* status) {
    return guarded(status, [&] {
        const DeviceInfo info = Device::info(device);
        std::snprintf(out->name, sizeof out->name, "%s", info.name.c_str());
        out->total_bytes = info.total_bytes;
    });
}

int model_create(const tl_model_desc* desc, const tl_options* options, tl_model** out, tl_status* status) {
    return guarded(status, [&] { *out = new tl_model(*desc, *options); });
}
void model_destroy(tl_model* model) { delete model; }
uint64_t model_bytes(const tl_model* model) { return model->bytes(); }
int64_t free_bytes(const tl_model* model) {
    try {
        return model->device->free_bytes();
    } catch (const std::exception&) {  // a device that does not answer lends nothing
        return 0;
    }
}
const char* model_level(const tl_model* model) { return model->device->level().c_str(); }
uint64_t steps(const tl_model* model) { return model->steps.load(std::memory_order_relaxed); }

int cache_create(tl_model* model, const tl_cache_desc* shape, tl_cache** out, tl_status* status) {
    return guarded(status, [&] {
        model->device->use();
        *out = new tl_cache(model->device, model->desc, *shape, model->max_rows);
    });
}
void cache_destroy(tl_cache* cache) { delete cache; }
uint64_t cache_bytes(const tl_model* model, const tl_cache_desc* shape) {
    return tl_cache::bytes(model->desc, *shape, model->max_rows);
}

int states_create(tl_model* model, int32_t count, tl_states** out, tl_status* status) {
    return guarded(status, [&] {
        model->device->use();
        *out = new tl_states(model->device, count, padded(model->desc.d_model, 8));
    });
}
void states_destroy(tl_states* states) { delete states; }
uint64_t states_bytes(const tl_model* model, int32_t count) {
    return uint64_t(count) * static_cast<uint64_t>(padded(model->desc.d_model, 8)) * 2 * sizeof(float);
}

int cache_copy(tl_model* model, tl_cache* to, const tl_cache* from, int32_t slots, int32_t loops, tl_status* status) {
    return guarded(status, [&] {
        model->device->use();
        to->copy_from(*from, slots, loops);
        model->device->wait();  // the source may be freed
    });
}
int cache_move(tl_model* model, tl_cache* cache, int32_t to_slot, int32_t from_slot, tl_status* status) {
    return guarded(status, [&] {
        model->device->use();
        cache->move(to_slot, from_slot);
    });
}

int forward(tl_model* model, tl_cache* const* caches, int32_t, tl_states* states, const tl_row* rows, int32_t n_rows,
            float* logits, tl_rank* best, int32_t* loops_run, tl_status* status) {
    return guarded(status, [&] {
        model->device->use();
        model->forward(caches, states, rows, n_rows, logits, best, loops_run);
    });
}

const tl_backend kTable = {
    TL_BACKEND_ABI, sizeof(tl_backend), TINYLOOP_DEVICE_NAME, kMostBest,    device_count, device_info,  model_create,
    model_destroy,  model_bytes,        free_bytes,           model_level,  steps,        cache_create, cache_destroy,
    cache_bytes,    states_create,      states_destroy,       states_bytes, cache_copy,   cache_move,   forward};

}  // namespace

extern "C" __attribute__((visibility("default"))) const tl_backend* tinyloop_backend(void) { return &kTable; }
