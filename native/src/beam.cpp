#include "beam.h"

#include <algorithm>
#include <cmath>

namespace tinyloop {
namespace {

struct Candidate {
    double logprob;
    int beam;
    int32_t token;
};

double rank_of(double logprob, size_t length, double penalty) {
    return logprob / std::pow(static_cast<double>(length), penalty);
}

}  // namespace

Generation beam_search(Model& model, const std::vector<int32_t>& prompt, const GenerateConfig& config, int loops,
                       const TokenCallback& on_token) {
    const Clock::time_point start = Clock::now();
    const size_t vocab = static_cast<size_t>(model.config().vocab_size), width = static_cast<size_t>(config.beam_size);
    std::vector<Cache> caches;  // one per beam; two sets, so that beams can take over each other's
    std::vector<Lane> lanes;
    lanes.emplace_back(model, prompt, config, loops);
    for (size_t i = 0; i < 2 * width; ++i) caches.push_back(lanes[0].make_cache());
    std::vector<float> logits(width * vocab);
    LogitRow ranking;
    std::vector<double> scores = {0};
    std::vector<Generation> finished;
    std::vector<double> finished_rank;
    prefill_plain(lanes[0], 0, caches[0], {caches[0].get()}, {logits.data()});
    const double prefill_ms = ms_since(start);
    const Clock::time_point decoding = Clock::now();
    double first_ms = 0;

    auto finish = [&](const Lane& lane, double logprob) {
        finished.push_back(lane.out);
        finished_rank.push_back(rank_of(logprob, lane.out.tokens.size(), config.length_penalty));
    };
    while (!lanes.empty() && finished.size() < width) {
        std::vector<Candidate> candidates;
        for (size_t b = 0; b < lanes.size(); ++b) {
            float* row = logits.data() + b * vocab;
            lanes[b].sampler.penalize(row);
            ranking.read(row, static_cast<int>(vocab));
            const double offset = scores[b] - log_sum_exp(ranking);
            for (const Rank& token : ranking.first(2 * config.beam_size))
                candidates.push_back({offset + token.logit, static_cast<int>(b), token.id});
        }
        std::sort(candidates.begin(), candidates.end(), [](const Candidate& x, const Candidate& y) {
            return x.logprob != y.logprob ? x.logprob > y.logprob
                   : x.beam != y.beam     ? x.beam < y.beam
                                          : x.token < y.token;
        });
        std::vector<Lane> next;
        std::vector<double> next_scores;
        std::vector<int> parents;
        for (const Candidate& c : candidates) {
            if (next.size() == width || finished.size() >= width) break;
            Lane grown(model, prompt, config, loops);
            for (const int32_t token : lanes[c.beam].out.tokens) grown.take(token);
            grown.take(c.token);
            if (grown.stopped()) {
                finish(grown, c.logprob);
                continue;
            }
            next.push_back(std::move(grown));
            next_scores.push_back(c.logprob);
            parents.push_back(c.beam);
        }
        if (first_ms == 0) first_ms = ms_since(start);
        // Each new beam needs its parent's cache: the first child takes it over, the others get copies.
        std::vector<Cache> arranged;
        std::vector<int> owner(2 * width, -1);
        for (size_t i = 0; i < next.size(); ++i)
            if (std::find(parents.begin(), parents.begin() + static_cast<std::ptrdiff_t>(i), parents[i]) ==
                parents.begin() + static_cast<std::ptrdiff_t>(i))
                owner[static_cast<size_t>(parents[i])] = static_cast<int>(i);
        std::vector<size_t> source(next.size()), spare;
        for (size_t c = 0; c < caches.size(); ++c)
            if (owner[c] < 0) spare.push_back(c);
        for (size_t i = 0; i < next.size(); ++i) {
            const size_t parent = static_cast<size_t>(parents[i]);
            source[i] = parent;
            if (owner[parent] == static_cast<int>(i)) continue;
            source[i] = spare.back();
            spare.pop_back();
            caches[source[i]].copy_from(caches[parent], next[i].length() - 1, loops);
        }
        for (const size_t s : source) arranged.push_back(std::move(caches[s]));
        for (size_t c = 0; c < caches.size(); ++c)
            if (std::find(source.begin(), source.end(), c) == source.end()) arranged.push_back(std::move(caches[c]));
        caches = std::move(arranged);
        lanes = std::move(next);
        scores = std::move(next_scores);
        if (lanes.empty() || finished.size() >= width) break;
        std::vector<tl_row> rows;
        std::vector<tl_cache*> handles;
        for (size_t b = 0; b < lanes.size(); ++b) {
            rows.push_back(
                lanes[b].row(static_cast<int>(b), lanes[b].length() - 1, lanes[b].out.tokens.back(), TL_ROW_LOGITS));
            handles.push_back(caches[b].get());
        }
        model.forward(handles, nullptr, rows, {logits.data()});
    }
    std::vector<size_t> order(finished.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t x, size_t y) { return finished_rank[x] > finished_rank[y]; });
    Generation out = finished[order[0]];
    for (const size_t i : order) out.beams.push_back({finished[i].tokens, finished_rank[i]});
    out.stats.prefill_ms = prefill_ms;
    out.stats.first_token_ms = first_ms;
    out.stats.decode_ms = ms_since(decoding);
    out.stats.generated_tokens = static_cast<int>(out.tokens.size());
    out.stats.mean_loops = loops;
    for (const Cache& cache : caches) out.stats.cache_bytes += cache.bytes();
    int position = static_cast<int>(prompt.size());
    for (const int32_t token : out.tokens)
        if (on_token && !on_token(token, position++)) break;
    return out;
}

}  // namespace tinyloop
