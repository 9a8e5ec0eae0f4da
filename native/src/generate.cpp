// The decode loop: prefill each lane in turn, then all lanes one token per step. One lane is the same loop.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "model.h"
#include "sampling.h"

namespace tinyloop {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

struct Lane {
    Lane(const Model& model, const std::vector<int32_t>& prompt_, const GenerateConfig& config_, int loops)
        : prompt(prompt_), config(config_), sampler(config_, model.config().vocab_size) {
        for (int32_t token : prompt) sampler.saw(token);
        out.stats.prompt_tokens = static_cast<int>(prompt.size());
        out.stats.loops = loops;
    }

    bool stopped() const { return !out.stats.stop_reason.empty(); }
    int length() const { return static_cast<int>(prompt.size() + out.tokens.size()); }

    // Whether the tokens so far end in one of the stop sequences.
    bool ends_in_stop_sequence() const {
        return std::any_of(
            config.stop_sequences.begin(), config.stop_sequences.end(), [&](const std::vector<int32_t>& stop) {
                return stop.size() <= out.tokens.size() && std::equal(stop.rbegin(), stop.rend(), out.tokens.rbegin());
            });
    }

    // Takes the next token from `logits` (work space) and says whether the lane stops with it.
    void advance(float* logits, const std::vector<int>& eos_ids) {
        const int32_t token = sampler.sample(logits, length());
        out.tokens.push_back(token);
        sampler.saw(token);
        if (!config.ignore_eos && std::find(eos_ids.begin(), eos_ids.end(), token) != eos_ids.end())
            out.stats.stop_reason = "eos";
        else if (ends_in_stop_sequence())
            out.stats.stop_reason = "stop_sequence";
        else if (static_cast<int>(out.tokens.size()) == config.max_tokens)
            out.stats.stop_reason = "max_tokens";
    }

    const std::vector<int32_t>& prompt;
    const GenerateConfig& config;
    Sampler sampler;
    Generation out;
};

// ---------------------------------------------------------------- contracts (SPEC 2.4)

int loops_of(const Model& model, int asked) {
    const ModelConfig& c = model.config();
    if (asked < 0 || asked > c.max_loops)
        refuse(ErrorKind::limit, "loops", std::to_string(asked),
               "0 (the default, " + std::to_string(c.loops) + ") to " + std::to_string(c.max_loops));
    return asked ? asked : c.loops;
}

void check_tokens(const Model& model, const std::vector<int32_t>& tokens, const std::string& field) {
    if (tokens.empty()) refuse(ErrorKind::config, field, "empty", "at least one token");
    const int vocab = model.config().vocab_size;
    for (size_t i = 0; i < tokens.size(); ++i)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            refuse(ErrorKind::config, field + "[" + std::to_string(i) + "]", std::to_string(tokens[i]),
                   "a token id from 0 to " + std::to_string(vocab - 1));
}

void check_lane(const Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& config,
                const std::string& prompt_field) {
    check_tokens(model, prompt, prompt_field);
    check_sampling(config);
    loops_of(model, config.loops);
    if (config.max_tokens < 1) refuse(ErrorKind::config, "max_tokens", std::to_string(config.max_tokens), "1 or more");
    const int64_t need = static_cast<int64_t>(prompt.size()) + config.max_tokens;
    if (need > model.options().max_seq_len)
        refuse(ErrorKind::limit, "max_tokens", std::to_string(config.max_tokens),
               "prompt_len + max_tokens <= max_seq_len, but " + std::to_string(prompt.size()) + " + " +
                   std::to_string(config.max_tokens) + " = " + std::to_string(need) + " > " +
                   std::to_string(model.options().max_seq_len));
    if (config.cache_mode != "fp16") refuse(ErrorKind::config, "cache_mode", config.cache_mode, "fp16");
    if (config.cache_window != 0)
        refuse(ErrorKind::config, "cache_window", std::to_string(config.cache_window),
               "0: this version keeps the whole context");
    if (config.beam_size != 1)
        refuse(ErrorKind::config, "beam_size", std::to_string(config.beam_size), "1: this version has no beam search");
    for (size_t i = 0; i < config.stop_sequences.size(); ++i)
        check_tokens(model, config.stop_sequences[i], "stop_sequences[" + std::to_string(i) + "]");
}

void check_batch(const std::vector<std::vector<int32_t>>& prompts, const std::vector<GenerateConfig>& configs) {
    if (prompts.empty()) refuse(ErrorKind::config, "prompts", "empty", "at least one prompt");
    if (configs.size() != 1 && configs.size() != prompts.size())
        refuse(ErrorKind::config, "configs", std::to_string(configs.size()) + " configs",
               "1 or one per prompt, " + std::to_string(prompts.size()));
    const GenerateConfig& first = configs[0];
    for (const GenerateConfig& c : configs) {
        if (c.cache_window > 0)
            refuse(ErrorKind::mode, "cache_window", std::to_string(c.cache_window),
                   "0 in a batch: batch and cache_window exclude each other");
        if (c.beam_size > 1)
            refuse(ErrorKind::mode, "beam_size", std::to_string(c.beam_size),
                   "1 in a batch: batch and beam search exclude each other");
        auto shared = [](const char* field, auto value, auto wanted) {
            if (value != wanted)
                refuse(ErrorKind::mode, field, std::to_string(value),
                       std::to_string(wanted) + ", as in lane 0: the lanes of a batch share it");
        };
        shared("loops", c.loops, first.loops);
        shared("temperature", c.temperature, first.temperature);
        shared("top_k", c.top_k, first.top_k);
        shared("top_p", c.top_p, first.top_p);
        shared("min_p", c.min_p, first.min_p);
        shared("repetition_penalty", c.repetition_penalty, first.repetition_penalty);
        if (c.cache_mode != first.cache_mode)
            refuse(ErrorKind::mode, "cache_mode", c.cache_mode,
                   first.cache_mode + ", as in lane 0: the lanes of a batch share it");
    }
}

// A refusal is also a line on stderr (SPEC 2.4), written before any work is done.
template <class F>
void guard(F checks) {
    try {
        checks();
    } catch (const Error& error) {
        std::fprintf(stderr, "tinyloop: refused: %s\n", error.what());
        throw;
    }
}

// ---------------------------------------------------------------- the loop

tl_row row_of(int lane, int position, int32_t token, int loops, uint32_t flags) {
    return {lane, position, token, 0, loops, -1, flags};
}

void prefill(const Model& model, Lane& lane, int index, const std::vector<tl_cache*>& caches, float* logits) {
    std::vector<tl_row> rows;
    const int n = static_cast<int>(lane.prompt.size());
    for (int p = 0; p < n; ++p)
        rows.push_back(row_of(index, p, lane.prompt[p], lane.out.stats.loops, p + 1 < n ? TL_ROW_CODA : TL_ROW_LOGITS));
    model.forward(caches, nullptr, rows, logits);
}

void run(const Model& model, std::vector<Lane>& lanes, const StepCallback& on_step) {
    const Clock::time_point start = Clock::now();
    const size_t vocab = static_cast<size_t>(model.config().vocab_size);
    std::vector<Cache> held;
    std::vector<tl_cache*> caches;
    for (Lane& lane : lanes) {
        held.push_back(
            model.make_cache(static_cast<int>(lane.prompt.size()) + lane.config.max_tokens, lane.out.stats.loops));
        lane.out.stats.cache_bytes = held.back().bytes();
        caches.push_back(held.back().get());
    }
    std::vector<float> logits(lanes.size() * vocab);
    for (size_t i = 0; i < lanes.size(); ++i) {
        const Clock::time_point began = Clock::now();
        prefill(model, lanes[i], static_cast<int>(i), caches, logits.data() + i * vocab);
        lanes[i].out.stats.prefill_ms = ms_since(began);
    }
    const Clock::time_point decoding = Clock::now();
    std::vector<int32_t> step(lanes.size());
    std::vector<bool> cancel(lanes.size());
    std::vector<tl_row> rows(lanes.size());
    for (;;) {
        for (size_t i = 0; i < lanes.size(); ++i) {
            Lane& lane = lanes[i];
            step[i] = -1;
            if (lane.stopped()) continue;
            lane.advance(logits.data() + i * vocab, model.config().eos_ids);
            step[i] = lane.out.tokens.back();
            if (lane.out.tokens.size() == 1) lane.out.stats.first_token_ms = ms_since(start);
        }
        const bool go_on = !on_step || on_step(step, cancel);
        bool all_stopped = true;
        for (size_t i = 0; i < lanes.size(); ++i) {
            Lane& lane = lanes[i];
            if (!lane.stopped() && (!go_on || cancel[i])) lane.out.stats.stop_reason = "cancelled";
            if (step[i] >= 0) lane.out.stats.decode_ms = ms_since(decoding);
            all_stopped = all_stopped && lane.stopped();
        }
        if (all_stopped) break;
        // A stopped lane stays in the kernel shape: it repeats its last row, and what comes out is dropped.
        for (size_t i = 0; i < lanes.size(); ++i)
            if (step[i] >= 0 && !lanes[i].stopped())
                rows[i] = row_of(static_cast<int>(i), lanes[i].length() - 1, step[i], lanes[i].out.stats.loops,
                                 TL_ROW_LOGITS);
            else if (rows[i].flags == 0)  // stopped with its first token: repeat the prompt's last row
                rows[i] = row_of(static_cast<int>(i), static_cast<int>(lanes[i].prompt.size()) - 1,
                                 lanes[i].prompt.back(), lanes[i].out.stats.loops, TL_ROW_LOGITS);
        model.forward(caches, nullptr, rows, logits.data());
    }
    for (Lane& lane : lanes) lane.out.stats.generated_tokens = static_cast<int>(lane.out.tokens.size());
}

std::vector<Generation> results(std::vector<Lane>& lanes) {
    std::vector<Generation> out;
    for (Lane& lane : lanes) out.push_back(std::move(lane.out));
    return out;
}

}  // namespace

Generation generate_stream(Model* model, const int32_t* prompt, size_t prompt_len, const GenerateConfig& config,
                           const TokenCallback& on_token) {
    const std::vector<int32_t> tokens(prompt, prompt + prompt_len);
    const Model::Call call(*model);
    guard([&] { check_lane(*model, tokens, config, "prompt"); });
    std::vector<Lane> lanes;
    lanes.emplace_back(*model, tokens, config, loops_of(*model, config.loops));
    int position = static_cast<int>(prompt_len);
    StepCallback on_step;
    if (on_token)
        on_step = [&](const std::vector<int32_t>& step, std::vector<bool>&) { return on_token(step[0], position++); };
    run(*model, lanes, on_step);
    return std::move(lanes[0].out);
}

Generation generate(Model* model, const int32_t* prompt, size_t prompt_len, const GenerateConfig& config) {
    return generate_stream(model, prompt, prompt_len, config, {});
}

std::vector<Generation> generate_batch(Model* model, const std::vector<std::vector<int32_t>>& prompts,
                                       const std::vector<GenerateConfig>& configs, const StepCallback& on_step) {
    const Model::Call call(*model);
    auto config_of = [&](size_t i) -> const GenerateConfig& { return configs[configs.size() == 1 ? 0 : i]; };
    guard([&] {
        check_batch(prompts, configs);
        for (size_t i = 0; i < prompts.size(); ++i)
            check_lane(*model, prompts[i], config_of(i), "prompts[" + std::to_string(i) + "]");
    });
    std::vector<Lane> lanes;
    for (size_t i = 0; i < prompts.size(); ++i)
        lanes.emplace_back(*model, prompts[i], config_of(i), loops_of(*model, config_of(i).loops));
    run(*model, lanes, on_step);
    return results(lanes);
}

std::vector<float> logits(Model* model, const int32_t* prompt, size_t prompt_len, int loops) {
    const std::vector<int32_t> tokens(prompt, prompt + prompt_len);
    const Model::Call call(*model);
    int used = 0;
    guard([&] {
        check_tokens(*model, tokens, "prompt");
        used = loops_of(*model, loops);
        if (tokens.size() > static_cast<size_t>(model->options().max_seq_len))
            refuse(ErrorKind::limit, "prompt", std::to_string(tokens.size()) + " tokens",
                   "at most max_seq_len = " + std::to_string(model->options().max_seq_len));
    });
    const Cache cache = model->make_cache(static_cast<int>(tokens.size()), used);
    std::vector<tl_row> rows;
    for (size_t p = 0; p < tokens.size(); ++p)
        rows.push_back(row_of(0, static_cast<int>(p), tokens[p], used, TL_ROW_LOGITS));
    std::vector<float> out(tokens.size() * static_cast<size_t>(model->config().vocab_size));
    model->forward({cache.get()}, nullptr, rows, out.data());
    return out;
}

// ---------------------------------------------------------------- the model's own facts

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
    return std::string(model->backend().name) + "/" + model->backend().model_level(model->handle());
}
int threads(const Model* model) { return model->options().threads; }
uint64_t step_counter(const Model* model) { return model->backend().steps(model->handle()); }
uint64_t weight_bytes(const Model* model) { return model->backend().model_bytes(model->handle()); }

uint64_t cache_bytes(const Model* model, int tokens, const std::string& cache_mode, int loops) {
    if (tokens < 1) refuse(ErrorKind::config, "tokens", std::to_string(tokens), "1 or more");
    if (cache_mode != "fp16") refuse(ErrorKind::config, "cache_mode", cache_mode, "fp16");
    const tl_cache_desc shape{TL_CACHE_FP16, tokens, loops_of(*model, loops)};
    return model->backend().cache_bytes(model->handle(), &shape);
}

}  // namespace tinyloop
