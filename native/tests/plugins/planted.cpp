// The CPU backend as a plug-in with two devices, whose failures are planted: token 13 breaks a forward pass, token 14
// runs out of memory in one. Seven threads fail to load.
#include <cstdio>

#include "tinyloop/backend.h"

namespace {

int32_t device_count(tl_status*) { return 2; }

int device_info(int32_t device, tl_device_info* out, tl_status*) {
    std::snprintf(out->name, sizeof out->name, "planted device %d", device);
    out->total_bytes = 1 << 30;
    return TL_OK;
}

int64_t free_bytes(const tl_model*) { return 1 << 29; }

int model_create(const tl_model_desc* desc, const tl_options* options, tl_model** out, tl_status* status) {
    if (options->threads == 7) {
        std::snprintf(status->message, sizeof status->message, "planted on device %d", options->device);
        return TL_FAILED;
    }
    return tl_cpu_backend()->model_create(desc, options, out, status);
}

int forward(tl_model* model, tl_cache* const* caches, int32_t n_caches, tl_states* states, const tl_row* rows,
            int32_t n_rows, float* logits, int32_t* loops_run, tl_status* status) {
    for (int32_t i = 0; i < n_rows; ++i) {
        const int32_t token = rows[i].token;
        if (token != 13 && token != 14) continue;
        std::snprintf(status->message, sizeof status->message, "planted at token %d", token);
        return token == 13 ? TL_FAILED : TL_NO_MEMORY;
    }
    return tl_cpu_backend()->forward(model, caches, n_caches, states, rows, n_rows, logits, loops_run, status);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const tl_backend* tinyloop_backend(void) {
    static const tl_backend table = [] {
        tl_backend planted = *tl_cpu_backend();
        planted.name = "planted";
        planted.device_count = device_count;
        planted.device_info = device_info;
        planted.free_bytes = free_bytes;
        planted.model_create = model_create;
        planted.forward = forward;
        return planted;
    }();
    return &table;
}
