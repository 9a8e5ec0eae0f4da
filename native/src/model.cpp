#include "model.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "affinity.h"
#include "cpu/kernels.h"
#include "weight_formats.h"

namespace tinyloop {
namespace {

int threads_of(int asked, const std::string& affinity) {
    if (asked < 0 || asked > 1024) refuse(ErrorKind::config, "threads", std::to_string(asked), "0 (all cores) to 1024");
    if (asked > 0) return asked;
    const char* variable = std::getenv("TINYLOOP_THREADS");
    if (!variable || !*variable) {
        const std::vector<int> named = affinity_cpus(affinity);
        return static_cast<int>((named.empty() ? allowed_cpus() : named).size());
    }
    int value = 0;
    const char* end = variable + std::strlen(variable);
    const auto parsed = std::from_chars(variable, end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end || value < 1 || value > 1024)
        refuse(ErrorKind::config, "TINYLOOP_THREADS", variable, "an integer from 1 to 1024");
    return value;
}

LoadOptions resolve(LoadOptions options, const ModelConfig& config) {
    if (options.max_seq_len < 0 || options.max_seq_len > config.max_seq_len)
        refuse(ErrorKind::limit, "max_seq_len", std::to_string(options.max_seq_len),
               "0 (the artifact's) to " + std::to_string(config.max_seq_len));
    if (options.max_seq_len == 0) options.max_seq_len = config.max_seq_len;
    options.threads = threads_of(options.threads, options.affinity);
    if (options.prefill_chunk < 1 || options.prefill_chunk > 1 << 16)
        refuse(ErrorKind::config, "prefill_chunk", std::to_string(options.prefill_chunk), "1 to 65536 rows");
    const std::vector<std::string> levels = simd_levels();
    if (options.simd != "auto" && std::find(levels.begin(), levels.end(), options.simd) == levels.end()) {
        std::string accepted = "auto";
        for (const std::string& level : levels) accepted += ", " + level;
        refuse(ErrorKind::unavailable, "simd", options.simd, accepted);
    }
    return options;
}

std::unique_ptr<tl_model, void (*)(tl_model*)> create(const Device& device, const Artifact& artifact,
                                                      const LoadOptions& options, int weights,
                                                      const std::vector<int>& cpus) {
    const ModelConfig& c = artifact.info().config;
    std::vector<tl_layer> layers;
    const std::pair<const char*, int> parts[] = {{"prelude", c.n_prelude}, {"core", c.n_core}, {"coda", c.n_coda}};
    for (auto [part, count] : parts)
        for (int i = 0; i < count; ++i) {
            auto get = [&, p = std::string(part) + "." + std::to_string(i) + "."](const char* name) {
                return artifact.tensor(p + name);
            };
            layers.push_back({get("attn_norm.weight"), get("attn_post_norm.weight"), get("ffn_norm.weight"),
                              get("ffn_post_norm.weight"), get("wq.weight"), get("wk.weight"), get("wv.weight"),
                              get("wo.weight"), get("q_bias"), get("k_bias"), get("v_bias"), get("q_norm.weight"),
                              get("k_norm.weight"), get("w_gate.weight"), get("w_up.weight"), get("w_down.weight")});
        }
    tl_model_desc desc{};
    desc.vocab_size = c.vocab_size;
    desc.d_model = c.d_model;
    desc.n_heads = c.n_heads;
    desc.n_kv_heads = c.n_kv_heads;
    desc.head_dim = c.head_dim;
    desc.d_ffn = c.d_ffn;
    desc.n_prelude = c.n_prelude;
    desc.n_core = c.n_core;
    desc.n_coda = c.n_coda;
    desc.norm = c.norm;
    desc.injection = c.injection;
    desc.start = c.start;
    desc.rope = c.rope;
    desc.norm_eps = static_cast<float>(c.norm_eps);
    desc.rope_theta = static_cast<float>(c.rope_theta);
    desc.embed_scale = static_cast<float>(c.embed_scale);
    desc.logit_scale = static_cast<float>(c.logit_scale);
    desc.layers = layers.data();
    desc.embed = artifact.tensor("embed.weight");
    desc.head = artifact.tensor("head.weight");
    desc.inject = artifact.tensor("inject.weight");
    desc.loop_norm = artifact.tensor("loop_norm.weight");
    desc.core_norm = artifact.tensor("core_norm.weight");
    desc.final_norm = artifact.tensor("final_norm.weight");
    desc.exit_gate = artifact.tensor("exit_gate.weight");
    desc.exit_gate_bias = artifact.tensor("exit_gate.bias");
    tl_options backend_options{};
    backend_options.threads = options.threads;
    backend_options.max_rows = options.prefill_chunk;
    backend_options.simd = options.simd.c_str();
    backend_options.device = device.ordinal;
    backend_options.weights = weights;
    backend_options.cpus = cpus.empty() ? nullptr : cpus.data();
    tl_model* model = nullptr;
    tl_status status{};
    const int result = device.backend->model_create(&desc, &backend_options, &model, &status);
    check(result, status, "loading the model on " + device.name);
    return {model, device.backend->model_destroy};
}

}  // namespace

void check(int result, const tl_status& status, const std::string& doing) {
    if (result == TL_OK) return;
    const ErrorKind kind = result == TL_NO_MEMORY     ? ErrorKind::memory
                           : result == TL_UNAVAILABLE ? ErrorKind::unavailable
                                                      : ErrorKind::failed;
    throw Error(kind, doing, status.message, "", doing + ": " + status.message);
}

Cache::Cache(const tl_backend& backend, tl_model* model, const tl_cache_desc& shape)
    : backend_(&backend),
      model_(model),
      shape_(shape),
      cache_(nullptr, backend.cache_destroy),
      bytes_(backend.cache_bytes(model, &shape)) {
    tl_cache* cache = nullptr;
    tl_status status{};
    check(backend.cache_create(model, &shape, &cache, &status), status,
          "a cache of " + std::to_string(bytes_) + " bytes");
    cache_.reset(cache);
}

void Cache::copy_from(const Cache& other, int slots, int loops) {
    tl_status status{};
    check(backend_->cache_copy(model_, get(), other.get(), slots, loops, &status), status, "copying a cache");
}

void Cache::move(int to_slot, int from_slot) {
    tl_status status{};
    check(backend_->cache_move(model_, get(), to_slot, from_slot, &status), status, "moving a cache slot");
}

States::States(const tl_backend& backend, tl_model* model, int count)
    : bytes_(backend.states_bytes(model, count)), states_(nullptr, backend.states_destroy) {
    tl_states* states = nullptr;
    tl_status status{};
    check(backend.states_create(model, count, &states, &status), status, std::to_string(count) + " saved states");
    states_.reset(states);
}

Model::Model(const std::string& path, const LoadOptions& options)
    : device_(open_device(options.device)), handle_(nullptr, nullptr) {
    const Artifact file(path);
    info_ = file.info();
    options_ = resolve(options, info_.config);
    const int weights = parse_weight_format(options.weights, info_);
    options_.weights = weight_format_name(weights, info_);
    weights_in_place_ = file.panel_memory(weights);
    cpus_ = cpu_per_thread(options_.affinity, options_.threads);
    handle_ = create(device_, file, options_, weights, cpus_);
}

Cache Model::make_cache(int positions, int loops, int mode, int window) const {
    return Cache(backend(), handle(), {mode, positions, loops, window});
}

void Model::forward(const std::vector<tl_cache*>& caches, tl_states* states, const std::vector<tl_row>& rows,
                    RowLogits logits, int32_t* loops_run) const {
    const size_t most = static_cast<size_t>(options_.prefill_chunk);
    for (size_t begin = 0; begin < rows.size(); begin += most) {
        const size_t count = std::min(most, rows.size() - begin);
        tl_status status{};
        check(backend().forward(handle(), caches.data(), static_cast<int32_t>(caches.size()), states,
                                rows.data() + begin, static_cast<int32_t>(count), logits.whole, logits.first,
                                loops_run ? loops_run + begin : nullptr, &status),
              status, "a forward pass");
        for (size_t i = begin; i < begin + count; ++i) {
            if (!(rows[i].flags & TL_ROW_LOGITS)) continue;
            if (rows[i].best)
                logits.first += rows[i].best;
            else
                logits.whole += config().vocab_size;
        }
    }
}

int Model::loops_of(int asked) const {
    const ModelConfig& c = config();
    if (asked < 0 || asked > c.max_loops)
        refuse(ErrorKind::limit, "loops", std::to_string(asked),
               "0 (the default, " + std::to_string(c.loops) + ") to " + std::to_string(c.max_loops));
    return asked ? asked : c.loops;
}

Call::Call(Model& model) : model_(model) {
    if (model.busy_.exchange(true, std::memory_order_acquire))
        refuse(ErrorKind::busy, "model", "in use by another call", "one call at a time: a model is not re-entrant");
}

void Call::claim(std::atomic<bool>& busy, const Model* owner, const char* kind) {
    auto fail = [&](ErrorKind error, const char* value, const char* accepted) {
        model_.busy_.store(false,
                           std::memory_order_release);  // the destructor does not run when the constructor throws
        refuse(error, kind, value, accepted);
    };
    if (owner && owner != &model_)
        fail(ErrorKind::mode, "built with another model", "a handle of the model it is used with");
    if (busy.exchange(true, std::memory_order_acquire))
        fail(ErrorKind::busy, "in use by another call", "one call at a time: a handle is not re-entrant");
    handle_ = &busy;
}

Call::~Call() {
    if (handle_) handle_->store(false, std::memory_order_release);
    model_.busy_.store(false, std::memory_order_release);
}

std::vector<std::string> simd_levels() {
    std::vector<std::string> names;
    for (const cpu::Kernels* k : {cpu::avx512_kernels(), cpu::avx2_kernels(), cpu::portable_kernels()})
        if (k) names.emplace_back(k->name);
    return names;
}

}  // namespace tinyloop
