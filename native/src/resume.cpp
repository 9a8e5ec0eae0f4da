// Warm start: a prompt run at few loops keeps its states, and generating at more loops goes on from them. Exact,
// because a loop's keys and values do not depend on how many loops follow.
#include "lane.h"

namespace tinyloop {

class ResumeHandle {
  public:
    ResumeHandle(Model& model_, std::vector<int32_t> tokens_, int loops_, std::string cache_mode_, int cache_window_)
        : model(&model_),
          tokens(std::move(tokens_)),
          loops(loops_),
          cache_mode(std::move(cache_mode_)),
          cache_window(cache_window_),
          cache(model_.make_cache(static_cast<int>(tokens.size()), loops, cache_mode_of(cache_mode), cache_window)),
          states(model_.make_states(static_cast<int>(tokens.size()))) {
        const GenerateConfig config;
        const Lane lane(model_, tokens, config, loops);
        std::vector<tl_row> rows;
        for (int p = 0; p < lane.prompt_length(); ++p) {
            rows.push_back(lane.row(0, p, tokens[p], 0));
            rows.back().state = p;
        }
        model_.forward({cache.get()}, states.get(), rows, {});
    }

    Prefill prefill() const {
        return [this](Lane& lane, int index, Cache& own, const std::vector<tl_cache*>& caches, RowLogits logits) {
            const int n = lane.prompt_length();
            own.copy_from(cache, n, loops);
            lane.out.stats.loops_skipped = loops;
            std::vector<tl_row> rows;
            for (int p = 0; p < n; ++p) {
                rows.push_back(
                    lane.row(index, p, lane.prompt[p], TL_ROW_KEEP_STATE | (p + 1 < n ? TL_ROW_CODA : TL_ROW_LOGITS)));
                rows.back().loop_begin = loops;
                rows.back().state = p;
            }
            lane.model.forward(caches, states.get(), rows, logits);
        };
    }

    const Model* model;
    std::vector<int32_t> tokens;
    int loops;
    std::string cache_mode;
    int cache_window;
    Cache cache;
    States states;  // (prompt length)
    std::atomic<bool> busy{false};
};

ResumeHandle* create_resume_handle(Model* model, const int32_t* prompt, size_t prompt_len, int loops_used,
                                   const std::string& cache_mode, int cache_window) {
    const Call call(*model);
    std::vector<int32_t> tokens(prompt, prompt + prompt_len);
    guard([&] {
        GenerateConfig config;
        config.max_tokens = 1;
        config.loops = loops_used;
        config.cache_mode = cache_mode;
        config.cache_window = cache_window;
        check_request(*model, tokens, config, kResume);
    });
    return new ResumeHandle(*model, std::move(tokens), model->loops_of(loops_used), cache_mode, cache_window);
}

void free_resume_handle(ResumeHandle* handle) { delete handle; }
uint64_t handle_bytes(const ResumeHandle* handle) { return handle->cache.bytes() + handle->states.bytes(); }
int loops_used(const ResumeHandle* handle) { return handle->loops; }

Generation resume_generate(Model* model, ResumeHandle* handle, int loops, const GenerateConfig& config,
                           const TokenCallback& on_token) {
    const Call call(*model, *handle, "handle");
    const int wanted = model->loops_of(loops);
    guard([&] {
        check_request(*model, handle->tokens, config, kResume);
        if (wanted < handle->loops)
            refuse(ErrorKind::mode, "loops", std::to_string(wanted),
                   std::to_string(handle->loops) + " or more: the handle has run that many");
        if (config.cache_mode != handle->cache_mode)
            refuse(ErrorKind::mode, "cache_mode", config.cache_mode,
                   handle->cache_mode + ", which the handle was built with");
        if (config.cache_window != handle->cache_window)
            refuse(ErrorKind::mode, "cache_window", std::to_string(config.cache_window),
                   std::to_string(handle->cache_window) + ", which the handle was built with");
    });
    return run_single(*model, handle->tokens, config, wanted, handle->prefill(), on_token);
}

}  // namespace tinyloop
