// The plain ways to generate: one prompt, one prompt streamed, a static lockstep batch.
#include "beam.h"
#include "lane.h"

namespace tinyloop {
namespace {

void check_batch(const std::vector<std::vector<int32_t>>& prompts, const std::vector<GenerateConfig>& configs) {
    if (prompts.empty()) refuse(ErrorKind::config, "prompts", "empty", "at least one prompt");
    if (configs.size() != 1 && configs.size() != prompts.size())
        refuse(ErrorKind::config, "configs", std::to_string(configs.size()) + " configs",
               "1 or one per prompt, " + std::to_string(prompts.size()));
    const GenerateConfig& first = configs[0];
    for (const GenerateConfig& c : configs) {
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
        shared("cache_window", c.cache_window, first.cache_window);
        shared("beam_size", c.beam_size, first.beam_size);
        shared("exit_threshold", c.exit_threshold, first.exit_threshold);
        if (c.cache_mode != first.cache_mode)
            refuse(ErrorKind::mode, "cache_mode", c.cache_mode,
                   first.cache_mode + ", as in lane 0: the lanes of a batch share it");
    }
}

bool speculates(const Model& model, const GenerateConfig& config) {
    const int loops = config.loops ? config.loops : model.config().loops;
    return config.speculative && loops >= SpeculativeConfig{}.draft_loops && modes_allow(config, kSpeculative);
}

}  // namespace

Generation generate_stream(Model* model, const int32_t* prompt, size_t prompt_len, const GenerateConfig& config,
                           const TokenCallback& on_token) {
    if (speculates(*model, config)) return generate_speculative(model, prompt, prompt_len, {}, config, on_token);
    const std::vector<int32_t> tokens(prompt, prompt + prompt_len);
    const Call call(*model);
    guard([&] { check_request(*model, tokens, config, kSingle); });
    const int loops = model->loops_of(config.loops);
    if (config.beam_size > 1) return beam_search(*model, tokens, config, loops, on_token);
    return run_single(*model, tokens, config, loops, prefill_plain, on_token);
}

Generation generate(Model* model, const int32_t* prompt, size_t prompt_len, const GenerateConfig& config) {
    return generate_stream(model, prompt, prompt_len, config, {});
}

std::vector<Generation> generate_batch(Model* model, const std::vector<std::vector<int32_t>>& prompts,
                                       const std::vector<GenerateConfig>& configs, const StepCallback& on_step) {
    const Call call(*model);
    auto config_of = [&](size_t i) -> const GenerateConfig& { return configs[configs.size() == 1 ? 0 : i]; };
    guard([&] {
        check_batch(prompts, configs);
        for (size_t i = 0; i < prompts.size(); ++i)
            check_request(*model, prompts[i], config_of(i), kBatch, "prompts[" + std::to_string(i) + "]");
    });
    std::vector<Lane> lanes;
    for (size_t i = 0; i < prompts.size(); ++i)
        lanes.emplace_back(*model, prompts[i], config_of(i), model->loops_of(config_of(i).loops));
    run_lanes(lanes, prefill_plain, on_step);
    std::vector<Generation> out;
    for (Lane& lane : lanes) out.push_back(std::move(lane.out));
    return out;
}

std::vector<float> logits(Model* model, const int32_t* prompt, size_t prompt_len, int loops,
                          const std::string& cache_mode, int cache_window) {
    const std::vector<int32_t> tokens(prompt, prompt + prompt_len);
    const Call call(*model);
    const GenerateConfig config;
    guard([&] {
        check_tokens(*model, tokens, "prompt");
        if (tokens.size() > static_cast<size_t>(model->options().max_seq_len))
            refuse(ErrorKind::limit, "prompt", std::to_string(tokens.size()) + " tokens",
                   "at most max_seq_len = " + std::to_string(model->options().max_seq_len));
        if (cache_mode_of(cache_mode) < 0) refuse(ErrorKind::config, "cache_mode", cache_mode, cache_mode_names());
    });
    const Lane lane(*model, tokens, config, model->loops_of(loops));
    const Cache cache =
        model->make_cache(lane.prompt_length(), lane.out.stats.loops, cache_mode_of(cache_mode), cache_window);
    std::vector<tl_row> rows;
    for (int p = 0; p < lane.prompt_length(); ++p) {
        rows.push_back(lane.row(0, p, tokens[p], TL_ROW_LOGITS));
        rows.back().best = 0;
    }
    std::vector<float> out(tokens.size() * static_cast<size_t>(model->config().vocab_size));
    model->forward({cache.get()}, nullptr, rows, {out.data()});
    return out;
}

}  // namespace tinyloop
