// Prefix reuse: a prompt's first tokens are run once, and their cache is copied into every lane that starts with them.
#include <algorithm>
#include <list>

#include "lane.h"

namespace tinyloop {

class PrefixCache {
  public:
    PrefixCache(Model& model_, std::vector<int32_t> tokens_, int loops_, std::string cache_mode_,
                double exit_threshold_)
        : model(&model_),
          tokens(std::move(tokens_)),
          loops(loops_),
          cache_mode(std::move(cache_mode_)),
          exit_threshold(exit_threshold_),
          cache(model_.make_cache(static_cast<int>(tokens.size()), loops, cache_mode_of(cache_mode))) {
        GenerateConfig config;
        config.exit_threshold = exit_threshold;
        const Lane lane(model_, tokens, config, loops);
        std::vector<tl_row> rows;
        for (int p = 0; p < lane.prompt_length(); ++p) rows.push_back(lane.row(0, p, tokens[p], TL_ROW_CODA));
        model_.forward({cache.get()}, nullptr, rows, {});
    }

    // How many of the prompt's tokens it saves: all but the last, whose logits are needed, can come from it.
    int reusable(const std::vector<int32_t>& prompt) const {
        return static_cast<int>(std::min(tokens.size(), prompt.size() - 1));
    }

    // The prefill of a lane whose prompt starts with these tokens.
    Prefill prefill() const {
        return [this](Lane& lane, int index, Cache& own, const std::vector<tl_cache*>& caches, RowLogits logits) {
            const int begin = reusable(lane.prompt);
            own.copy_from(cache, begin, loops);
            lane.out.stats.prefix_tokens = begin;
            prefill_from(lane, begin, index, caches, logits);
        };
    }

    const Model* model;
    std::vector<int32_t> tokens;
    int loops;
    std::string cache_mode;
    double exit_threshold;
    Cache cache;
    std::atomic<bool> busy{false};
};

class PrefixPool {
  public:
    explicit PrefixPool(int capacity_) : capacity(capacity_) {}

    // The longest registered prefix of the prompt that was built as the request wants it, as the most recently used.
    PrefixCache* find(const Model& wanted, const std::vector<int32_t>& prompt, const GenerateConfig& config,
                      int loops) {
        auto best = entries.end();
        for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
            const PrefixCache& p = **entry;
            const bool fits = p.model == &wanted && p.loops == loops && p.cache_mode == config.cache_mode &&
                              p.exit_threshold == config.exit_threshold && p.tokens.size() <= prompt.size() &&
                              std::equal(p.tokens.begin(), p.tokens.end(), prompt.begin());
            if (fits && (best == entries.end() || p.tokens.size() > (*best)->tokens.size())) best = entry;
        }
        if (best == entries.end()) return nullptr;
        entries.splice(entries.begin(), entries, best);
        return entries.front().get();
    }

    const int capacity;
    std::list<std::unique_ptr<PrefixCache>> entries;  // most recently used first
    const Model* model = nullptr;                     // the one its first prefix was registered with
    std::atomic<bool> busy{false};
};

namespace {

std::unique_ptr<PrefixCache> build(Model& model, const int32_t* tokens, size_t count, int n_loops,
                                   const std::string& cache_mode, double exit_threshold) {
    std::vector<int32_t> list(tokens, tokens + count);
    guard([&] {
        check_tokens(model, list, "tokens");
        model.loops_of(n_loops);
        if (cache_mode_of(cache_mode) < 0) refuse(ErrorKind::config, "cache_mode", cache_mode, cache_mode_names());
        if (!(exit_threshold >= 0 && exit_threshold <= 1))
            refuse(ErrorKind::config, "exit_threshold", std::to_string(exit_threshold), "0 (off) to 1");
        if (list.size() >= static_cast<size_t>(model.options().max_seq_len))
            refuse(ErrorKind::limit, "tokens", std::to_string(list.size()) + " tokens",
                   "fewer than max_seq_len = " + std::to_string(model.options().max_seq_len));
    });
    return std::make_unique<PrefixCache>(model, std::move(list), model.loops_of(n_loops), cache_mode, exit_threshold);
}

}  // namespace

PrefixCache* create_prefix_cache(Model* model, const int32_t* tokens, size_t count, int n_loops,
                                 const std::string& cache_mode, double exit_threshold) {
    const Call call(*model);
    return build(*model, tokens, count, n_loops, cache_mode, exit_threshold).release();
}

void free_prefix_cache(PrefixCache* prefix) { delete prefix; }
uint64_t handle_bytes(const PrefixCache* prefix) { return prefix->cache.bytes(); }
const std::vector<int32_t>& prefix_tokens(const PrefixCache* prefix) { return prefix->tokens; }

Generation generate_from_prefix_cache(Model* model, PrefixCache* prefix, const int32_t* suffix, size_t suffix_len,
                                      const GenerateConfig& config, const TokenCallback& on_token) {
    const Call call(*model, *prefix, "prefix");
    std::vector<int32_t> prompt = prefix->tokens;
    prompt.insert(prompt.end(), suffix, suffix + suffix_len);
    guard([&] {
        check_request(*model, prompt, config, kPrefix);
        const int loops = model->loops_of(config.loops);
        if (loops != prefix->loops)
            refuse(ErrorKind::mode, "loops", std::to_string(loops),
                   std::to_string(prefix->loops) + ", which the prefix was built at");
        if (config.cache_mode != prefix->cache_mode)
            refuse(ErrorKind::mode, "cache_mode", config.cache_mode,
                   prefix->cache_mode + ", which the prefix was built with");
        if (config.exit_threshold != prefix->exit_threshold)
            refuse(ErrorKind::mode, "exit_threshold", std::to_string(config.exit_threshold),
                   std::to_string(prefix->exit_threshold) + ", which the prefix was built with");
    });
    return run_single(*model, prompt, config, prefix->loops, prefix->prefill(), on_token);
}

PrefixPool* create_prefix_pool(int capacity) {
    guard([&] {
        if (capacity < 1) refuse(ErrorKind::config, "capacity", std::to_string(capacity), "1 or more prefixes");
    });
    return new PrefixPool(capacity);
}

void free_prefix_pool(PrefixPool* pool) { delete pool; }
int pool_size(const PrefixPool* pool) { return static_cast<int>(pool->entries.size()); }

uint64_t handle_bytes(const PrefixPool* pool) {
    uint64_t total = 0;
    for (const auto& entry : pool->entries) total += entry->cache.bytes();
    return total;
}

void register_prefix(PrefixPool* pool, Model* model, const int32_t* tokens, size_t count, int n_loops,
                     const std::string& cache_mode) {
    const Call call(*model, *pool, "pool");
    std::unique_ptr<PrefixCache> built = build(*model, tokens, count, n_loops, cache_mode, 0);
    pool->model = model;
    pool->entries.remove_if([&](const auto& e) {
        return e->tokens == built->tokens && e->loops == built->loops && e->cache_mode == built->cache_mode;
    });
    pool->entries.push_front(std::move(built));
    if (static_cast<int>(pool->entries.size()) > pool->capacity) pool->entries.pop_back();
}

Generation generate_with_pool(Model* model, PrefixPool* pool, const int32_t* prompt, size_t prompt_len,
                              const GenerateConfig& config, const TokenCallback& on_token) {
    const Call call(*model, *pool, "pool");
    const std::vector<int32_t> tokens(prompt, prompt + prompt_len);
    guard([&] { check_request(*model, tokens, config, kPrefix); });
    const int loops = model->loops_of(config.loops);
    const PrefixCache* found = pool->find(*model, tokens, config, loops);
    return run_single(*model, tokens, config, loops, found ? found->prefill() : prefill_plain, on_token);
}

}  // namespace tinyloop
