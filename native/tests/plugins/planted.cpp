// The CPU backend as a plug-in with two devices that gives a row's first tokens in rank, by sorting all. Its failures
// are planted: at position 1, token 13 breaks a forward pass and token 14 runs out of memory in one. Seven threads fail
// to load.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <vector>

#include "tinyloop/backend.h"

namespace {

int32_t device_count(tl_status*) { return 2; }

int device_info(int32_t device, tl_device_info* out, tl_status*) {
    std::snprintf(out->name, sizeof out->name, "planted device %d", device);
    out->total_bytes = 1 << 30;
    return TL_OK;
}

int64_t free_bytes(const tl_model*) { return 1 << 29; }

std::map<const tl_model*, size_t> vocabularies;
uint64_t whole_rows = 0;  // of logits, given so far

int model_create(const tl_model_desc* desc, const tl_options* options, tl_model** out, tl_status* status) {
    if (options->threads == 7) {
        std::snprintf(status->message, sizeof status->message, "planted on device %d", options->device);
        return TL_FAILED;
    }
    const int result = tl_cpu_backend()->model_create(desc, options, out, status);
    if (result == TL_OK) vocabularies[*out] = static_cast<size_t>(desc->vocab_size);
    return result;
}

void model_destroy(tl_model* model) {
    vocabularies.erase(model);
    tl_cpu_backend()->model_destroy(model);
}

tl_rank* put_best(const std::vector<float>& logits, int32_t count, tl_rank* to) {
    std::vector<tl_rank> ranks;
    for (size_t id = 0; id < logits.size(); ++id)
        if (logits[id] > -INFINITY) ranks.push_back({logits[id], static_cast<int32_t>(id)});
    std::stable_sort(ranks.begin(), ranks.end(), [](const tl_rank& a, const tl_rank& b) { return a.logit > b.logit; });
    ranks.resize(static_cast<size_t>(count), {-INFINITY, -1});
    return std::copy(ranks.begin(), ranks.end(), to);
}

int forward(tl_model* model, tl_cache* const* caches, int32_t n_caches, tl_states* states, const tl_row* rows,
            int32_t n_rows, float* logits, tl_rank* best, int32_t* loops_run, tl_status* status) {
    for (int32_t i = 0; i < n_rows; ++i) {
        const int32_t token = rows[i].token;
        if (rows[i].position != 1 || (token != 13 && token != 14)) continue;
        std::snprintf(status->message, sizeof status->message, "planted at token %d", token);
        return token == 13 ? TL_FAILED : TL_NO_MEMORY;
    }
    const size_t vocab = vocabularies[model];
    std::vector<float> all(static_cast<size_t>(n_rows) * vocab);
    const int result = tl_cpu_backend()->forward(model, caches, n_caches, states, rows, n_rows, all.data(), nullptr,
                                                 loops_run, status);
    const float* from = all.data();
    for (int32_t i = 0; i < n_rows; ++i) {
        if (!(rows[i].flags & TL_ROW_LOGITS)) continue;
        if (rows[i].best)
            best = put_best({from, from + vocab}, rows[i].best, best);
        else
            logits = std::copy_n(from, vocab, logits), ++whole_rows;
        from += vocab;
    }
    return result;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) uint64_t planted_whole_rows(void) { return whole_rows; }
extern "C" __attribute__((visibility("default"))) const tl_backend* tinyloop_backend(void) {
    static const tl_backend table = [] {
        tl_backend planted = *tl_cpu_backend();
        planted.name = "planted";
        planted.most_best = 64;
        planted.device_count = device_count;
        planted.device_info = device_info;
        planted.free_bytes = free_bytes;
        planted.model_create = model_create;
        planted.model_destroy = model_destroy;
        planted.forward = forward;
        return planted;
    }();
    return &table;
}
