// Loading and freeing a model, and what can be asked of it without computing.
#include "lane.h"

namespace tinyloop {

Model* load_model(const std::string& path, const LoadOptions& options) {
    Model* model = nullptr;
    guard([&] { model = new Model(path, options); });
    return model;
}

Model* load_model(const std::string& path, int max_seq_len) {
    LoadOptions options;
    options.max_seq_len = max_seq_len;
    return load_model(path, options);
}

void free_model(Model* model) { delete model; }

const ArtifactInfo& artifact(const Model* model) { return model->info(); }
int max_seq_len(const Model* model) { return model->options().max_seq_len; }
std::string device_level(const Model* model) {
    return model->device().name + "/" + model->backend().model_level(model->handle());
}
std::string weight_format(const Model* model) { return model->options().weights; }
int threads(const Model* model) { return model->options().threads; }
const std::vector<int>& cpus(const Model* model) { return model->cpus(); }
uint64_t step_counter(const Model* model) { return model->backend().steps(model->handle()); }
int64_t device_free_bytes(const Model* model) { return model->backend().free_bytes(model->handle()); }
uint64_t weight_bytes(const Model* model) { return model->backend().model_bytes(model->handle()); }

uint64_t cache_bytes(const Model* model, int tokens, const std::string& cache_mode, int loops, int cache_window) {
    if (tokens < 1) refuse(ErrorKind::config, "tokens", std::to_string(tokens), "1 or more");
    if (cache_window < 0) refuse(ErrorKind::config, "cache_window", std::to_string(cache_window), "0 or more");
    if (cache_mode_of(cache_mode) < 0) refuse(ErrorKind::config, "cache_mode", cache_mode, cache_mode_names());
    const tl_cache_desc shape{cache_mode_of(cache_mode), tokens, model->loops_of(loops), cache_window};
    return model->backend().cache_bytes(model->handle(), &shape);
}

uint64_t states_bytes(const Model* model, int tokens) {
    if (tokens < 1) refuse(ErrorKind::config, "tokens", std::to_string(tokens), "1 or more");
    return model->backend().states_bytes(model->handle(), tokens);
}

}  // namespace tinyloop
