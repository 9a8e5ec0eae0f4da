// One sequence being generated: what every way to generate shares. Contracts are checked here, before any work is done.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model.h"
#include "modes.h"
#include "sampling.h"

namespace tinyloop {

using Clock = std::chrono::steady_clock;
inline double ms_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Runs the checks; a refusal is also a line on stderr (SPEC 2.4).
void guard(const std::function<void()>& checks);

void check_tokens(const Model& model, const std::vector<int32_t>& tokens, const std::string& field);
// Everything that one request's fields must satisfy when it is generated in the way of `column` (modes.h).
void check_request(const Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& config,
                   const char* column, const std::string& prompt_field = "prompt");
// Whether the matrix lets what the request uses be combined with `column`.
bool modes_allow(const GenerateConfig& config, const char* column);

class Lane {
  public:
    // `prompt` and `config` must outlive the lane.
    Lane(const Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& config, int loops);

    bool stopped() const { return !out.stats.stop_reason.empty(); }
    int length() const { return static_cast<int>(prompt.size() + out.tokens.size()); }
    int prompt_length() const { return static_cast<int>(prompt.size()); }
    int capacity() const { return prompt_length() + config.max_tokens; }

    // Samples the next token from `logits` (work space), what a row() was asked for, and takes it.
    void advance(const RowLogits& logits);
    // Adds a token to the answer and says in the stats whether the lane stops with it.
    void take(int32_t token);
    void cancel() {
        if (!stopped()) out.stats.stop_reason = "cancelled";
    }
    // For the first token: since `start`.
    void mark_first(Clock::time_point start) {
        if (out.tokens.size() == 1) out.stats.first_token_ms = ms_since(start);
    }

    // A row of a plain sequence at `position`, in cache number `cache` of the call; of its logits it wants what
    // advance() needs.
    tl_row row(int cache, int position, int32_t token, uint32_t flags) const;
    // How many of the first in rank advance() needs; 0: the logits of all tokens.
    int decisive() const;
    // For the prompt, the answer and `extra` slots more.
    Cache make_cache(int extra = 0) const;

    const Model& model;
    const std::vector<int32_t>& prompt;
    const GenerateConfig& config;
    Sampler sampler;
    Generation out;

  private:
    bool ends_in_stop_sequence() const;

    std::unique_ptr<GrammarState> grammar_;
    std::vector<uint32_t> allowed_;
};

// Fills a lane's cache with its prompt and leaves the logits of its last token. cache: the index of the lane's cache.
using Prefill =
    std::function<void(Lane& lane, int cache, Cache& own, const std::vector<tl_cache*>& caches, RowLogits logits)>;
void prefill_plain(Lane& lane, int cache, Cache& own, const std::vector<tl_cache*>& caches, RowLogits logits);
// The prompt's tokens from `begin` on; the slots before are filled.
void prefill_from(Lane& lane, int begin, int cache, const std::vector<tl_cache*>& caches, RowLogits logits);

// Prefills each lane in turn, then decodes all lanes one token per step until every one has stopped.
void run_lanes(std::vector<Lane>& lanes, const Prefill& prefill, const StepCallback& on_step);

// The same for one lane.
Generation run_single(Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& config, int loops,
                      const Prefill& prefill, const TokenCallback& on_token);

}  // namespace tinyloop
