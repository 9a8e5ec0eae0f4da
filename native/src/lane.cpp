#include "lane.h"

#include <algorithm>
#include <cstdio>

namespace tinyloop {

void guard(const std::function<void()>& checks) {
    try {
        checks();
    } catch (const Error& error) {
        std::fprintf(stderr, "tinyloop: refused: %s\n", error.what());
        throw;
    }
}

void check_tokens(const Model& model, const std::vector<int32_t>& tokens, const std::string& field) {
    if (tokens.empty()) refuse(ErrorKind::config, field, "empty", "at least one token");
    const int vocab = model.config().vocab_size;
    for (size_t i = 0; i < tokens.size(); ++i)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            refuse(ErrorKind::config, field + "[" + std::to_string(i) + "]", std::to_string(tokens[i]),
                   "a token id from 0 to " + std::to_string(vocab - 1));
}

namespace {

// Refuses a mode that cannot be combined with the way to generate, naming both.
void check_mode(const std::string& row, const char* column, const std::string& field, const std::string& value) {
    if (!mode_supported(row, column))
        refuse(ErrorKind::mode, field, value, "no " + row + " here: " + row + " and " + column + " exclude each other");
}

// A row of the matrix that a request uses, with the field and the value that do.
struct Use {
    std::string row, field, value;
};

std::vector<Use> uses_of(const GenerateConfig& c) {
    std::vector<Use> uses;
    if (c.cache_window > 0) uses.push_back({"cache_window", "cache_window", std::to_string(c.cache_window)});
    if (c.beam_size > 1) uses.push_back({"beam", "beam_size", std::to_string(c.beam_size)});
    if (c.grammar) uses.push_back({"grammar", "grammar", "a grammar"});
    if (c.exit_threshold > 0) uses.push_back({"exit_threshold", "exit_threshold", std::to_string(c.exit_threshold)});
    uses.push_back({c.cache_mode, "cache_mode", c.cache_mode});
    return uses;
}

void check_modes(const GenerateConfig& c, const char* column) {
    if (cache_mode_of(c.cache_mode) < 0) refuse(ErrorKind::config, "cache_mode", c.cache_mode, cache_mode_names());
    for (const Use& use : uses_of(c)) check_mode(use.row, column, use.field, use.value);
}

}  // namespace

bool modes_allow(const GenerateConfig& config, const char* column) {
    const std::vector<Use> uses = uses_of(config);
    return std::all_of(uses.begin(), uses.end(), [&](const Use& use) { return mode_supported(use.row, column); });
}

void check_request(const Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& c, const char* column,
                   const std::string& prompt_field) {
    check_tokens(model, prompt, prompt_field);
    check_sampling(c);
    model.loops_of(c.loops);
    auto integer = [](const char* field, int64_t value, int64_t low, const char* accepted) {
        if (value < low) refuse(ErrorKind::config, field, std::to_string(value), accepted);
    };
    integer("max_tokens", c.max_tokens, 1, "1 or more");
    integer("cache_window", c.cache_window, 0, "0 (the whole context) or more positions");
    if (c.beam_size < 1 || c.beam_size > 64)
        refuse(ErrorKind::config, "beam_size", std::to_string(c.beam_size), "1 to 64");
    if (!(c.exit_threshold >= 0 && c.exit_threshold <= 1))
        refuse(ErrorKind::config, "exit_threshold", std::to_string(c.exit_threshold), "0 (off) to 1");
    const int64_t need = static_cast<int64_t>(prompt.size()) + c.max_tokens;
    const int most = model.options().max_seq_len;
    if (need > most)
        refuse(ErrorKind::limit, "max_tokens", std::to_string(c.max_tokens),
               "prompt_len + max_tokens <= max_seq_len, but " + std::to_string(prompt.size()) + " + " +
                   std::to_string(c.max_tokens) + " = " + std::to_string(need) + " > " + std::to_string(most));
    for (size_t i = 0; i < c.stop_sequences.size(); ++i)
        check_tokens(model, c.stop_sequences[i], "stop_sequences[" + std::to_string(i) + "]");
    check_modes(c, column);
    const int vocab = model.config().vocab_size;
    if (c.grammar && c.grammar.vocab_size != vocab)
        refuse(ErrorKind::config, "grammar", "vocab_size " + std::to_string(c.grammar.vocab_size),
               "a grammar compiled for vocab_size " + std::to_string(vocab) + ", the model's");
    if (c.beam_size > 1) {
        if (c.temperature > 0)
            refuse(ErrorKind::mode, "temperature", std::to_string(c.temperature),
                   "0 with beam_size > 1: beam search does not sample");
        if (c.grammar)
            refuse(ErrorKind::mode, "grammar", "a grammar",
                   "none with beam_size > 1: grammar and beam search exclude each other");
        if (c.exit_threshold > 0)
            refuse(ErrorKind::mode, "exit_threshold", std::to_string(c.exit_threshold), "0 with beam_size > 1");
    }
}

Lane::Lane(const Model& model_, const std::vector<int32_t>& prompt_, const GenerateConfig& config_, int loops)
    : model(model_), prompt(prompt_), config(config_), sampler(config_, model_.config().vocab_size) {
    for (int32_t token : prompt) sampler.saw(token);
    out.stats.prompt_tokens = prompt_length();
    out.stats.loops = loops;
    if (config.grammar) {
        grammar_ = config.grammar.start();
        allowed_.resize((static_cast<size_t>(model.config().vocab_size) + 31) / 32);
    }
}

Cache Lane::make_cache(int extra) const {
    return model.make_cache(capacity() + extra, out.stats.loops, cache_mode_of(config.cache_mode), config.cache_window);
}

tl_row Lane::row(int cache, int position, int32_t token, uint32_t flags) const {
    return {cache,
            position,
            position,
            position,
            1,
            token,
            0,
            out.stats.loops,
            -1,
            flags,
            static_cast<float>(config.exit_threshold),
            decisive()};
}

int Lane::decisive() const {
    // A grammar may forbid the first ones, and beams weigh their tokens against all others.
    return grammar_ || config.beam_size > 1 ? 0 : sampler.decisive(model.backend().most_best);
}

bool Lane::ends_in_stop_sequence() const {
    return std::any_of(
        config.stop_sequences.begin(), config.stop_sequences.end(), [&](const std::vector<int32_t>& stop) {
            return stop.size() <= out.tokens.size() && std::equal(stop.rbegin(), stop.rend(), out.tokens.rbegin());
        });
}

void Lane::advance(const RowLogits& logits) {
    if (!grammar_) {
        take(sampler.sample(logits, length()));
        return;
    }
    Clock::time_point start = Clock::now();
    std::fill(allowed_.begin(), allowed_.end(), 0);
    grammar_->allowed(allowed_.data());
    out.stats.grammar_ms += ms_since(start);
    const int32_t token = sampler.sample(logits, length(), allowed_.data());
    if (token < 0) {  // no token may follow, not even an end
        out.stats.stop_reason = "grammar";
        return;
    }
    take(token);
    start = Clock::now();
    grammar_->accept(token);
    if (out.stats.stop_reason != "eos" && grammar_->finished()) out.stats.stop_reason = "grammar";
    out.stats.grammar_ms += ms_since(start);
}

void Lane::take(int32_t token) {
    out.tokens.push_back(token);
    sampler.saw(token);
    const std::vector<int>& eos_ids = model.config().eos_ids;
    if (!config.ignore_eos && std::find(eos_ids.begin(), eos_ids.end(), token) != eos_ids.end())
        out.stats.stop_reason = "eos";
    else if (ends_in_stop_sequence())
        out.stats.stop_reason = "stop_sequence";
    else if (static_cast<int>(out.tokens.size()) == config.max_tokens)
        out.stats.stop_reason = "max_tokens";
}

void prefill_from(Lane& lane, int begin, int cache, const std::vector<tl_cache*>& caches, RowLogits logits) {
    std::vector<tl_row> rows;
    const int n = lane.prompt_length();
    for (int p = begin; p < n; ++p)
        rows.push_back(lane.row(cache, p, lane.prompt[p], p + 1 < n ? TL_ROW_CODA : TL_ROW_LOGITS));
    lane.model.forward(caches, nullptr, rows, logits);
}

void prefill_plain(Lane& lane, int cache, Cache&, const std::vector<tl_cache*>& caches, RowLogits logits) {
    prefill_from(lane, 0, cache, caches, logits);
}

void run_lanes(std::vector<Lane>& lanes, const Prefill& prefill, const StepCallback& on_step) {
    const Clock::time_point start = Clock::now();
    const Model& model = lanes[0].model;
    const size_t n = lanes.size();
    std::vector<Cache> held;
    std::vector<tl_cache*> caches;
    for (Lane& lane : lanes) {
        held.push_back(lane.make_cache());
        lane.out.stats.cache_bytes = held.back().bytes();
        caches.push_back(held.back().get());
    }
    std::vector<tl_row> rows;
    for (size_t i = 0; i < n; ++i)
        rows.push_back(
            lanes[i].row(static_cast<int>(i), lanes[i].prompt_length() - 1, lanes[i].prompt.back(), TL_ROW_LOGITS));
    LogitRows logits(model.config().vocab_size, rows);
    for (size_t i = 0; i < n; ++i) {
        const Clock::time_point began = Clock::now();
        prefill(lanes[i], static_cast<int>(i), held[i], caches, logits[i]);
        lanes[i].out.stats.prefill_ms = ms_since(began);
    }
    const Clock::time_point decoding = Clock::now();
    std::vector<int32_t> step(n), loops_run(n);
    std::vector<int64_t> total_loops(n);
    std::vector<bool> cancel(n);
    for (bool all_stopped = false; !all_stopped;) {
        for (size_t i = 0; i < n; ++i) {
            Lane& lane = lanes[i];
            const size_t before = lane.out.tokens.size();
            if (!lane.stopped()) lane.advance(logits[i]);
            step[i] = lane.out.tokens.size() > before ? lane.out.tokens.back() : -1;
            if (step[i] >= 0) lane.mark_first(start);
        }
        const bool go_on = !on_step || on_step(step, cancel);
        all_stopped = true;
        for (size_t i = 0; i < n; ++i) {
            Lane& lane = lanes[i];
            if (!go_on || cancel[i]) lane.cancel();
            if (step[i] >= 0) lane.out.stats.decode_ms = ms_since(decoding);
            all_stopped = all_stopped && lane.stopped();
            // A stopped lane stays in the kernel shape: it repeats its last row, and what comes out is dropped.
            if (!lane.stopped()) rows[i] = lane.row(static_cast<int>(i), lane.length() - 1, step[i], TL_ROW_LOGITS);
        }
        if (all_stopped) break;
        model.forward(caches, nullptr, rows, logits.all(), loops_run.data());
        for (size_t i = 0; i < n; ++i)
            if (!lanes[i].stopped()) total_loops[i] += loops_run[i];
    }
    for (size_t i = 0; i < n; ++i) {
        GenerateStats& stats = lanes[i].out.stats;
        stats.generated_tokens = static_cast<int>(lanes[i].out.tokens.size());
        stats.mean_loops = stats.generated_tokens > 1
                               ? static_cast<double>(total_loops[i]) / (stats.generated_tokens - 1)
                               : stats.loops;
    }
}

Generation run_single(Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& config, int loops,
                      const Prefill& prefill, const TokenCallback& on_token) {
    std::vector<Lane> lanes;
    lanes.emplace_back(model, prompt, config, loops);
    int position = static_cast<int>(prompt.size());
    StepCallback on_step;
    if (on_token)
        on_step = [&](const std::vector<int32_t>& step, std::vector<bool>&) {
            return step[0] < 0 || on_token(step[0], position++);
        };
    run_lanes(lanes, prefill, on_step);
    return std::move(lanes[0].out);
}

}  // namespace tinyloop
