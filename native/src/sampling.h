// From logits to a token, on the host: a pure function of (logits, tokens so far, config, position).
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "logit_row.h"
#include "logit_rows.h"
#include "ranked_row.h"
#include "tinyloop/engine.h"

namespace tinyloop {

// A uniform number in [0, 1) that depends on nothing but its arguments.
double uniform_draw(uint64_t seed, uint64_t position);

// The logarithm of the sum of e^logit.
double log_sum_exp(const LogitRow& row);

// Throws Error(config) naming the field.
void check_sampling(const GenerateConfig& config);

// One lane's sampler.
//
// Order: repetition penalty (Keskar et al., arXiv 1909.05858: logits of tokens already in the sequence are divided by
// it when positive, multiplied when negative), temperature, top-k, top-p (Holtzman et al., arXiv 1904.09751), min-p
// (Nguyen et al., arXiv 2407.01082), then the inverse of the cumulative distribution over the kept tokens in id order.
// Equal logits rank by id, so the result never depends on how a selection treats ties. Each filter keeps the first
// tokens in rank, so what is kept is told by the rank of the last one. Tokens of less than 2^-64 of the best one's
// weight are never drawn.
class Sampler {
  public:
    Sampler(const GenerateConfig& config, int vocab_size);

    // The token is in the sequence now, or (a rejected draft) no longer.
    void saw(int32_t token);
    void unsaw(int32_t token);
    // How many of the first in rank tell what it samples where all tokens are allowed, if they are at most `most`;
    // else 0: it needs the logits of all.
    int decisive(int most) const;
    // `logits`: of all tokens (then used as work space), or the `decisive` first or more. `position`: of the token to
    // sample in the whole sequence. `allowed`: a bit per token, or null. -1: none is allowed.
    int32_t sample(const RowLogits& logits, int position, const uint32_t* allowed = nullptr);
    void penalize(float* logits) const;

  private:
    template <class Row>
    int32_t choose(Row& row, int position);
    template <class Row>
    Rank nucleus(const Row& row, const Rank& last);
    template <class Row>
    int32_t draw(const Row& row, const Rank& last, double share);
    float floor_of(float top, double least_weight) const;

    struct BlockWeight {
        int index;
        double weight;
    };

    const double temperature_, top_p_, min_p_;
    const float repetition_penalty_;
    const int top_k_, vocab_size_;
    const uint64_t seed_;
    std::unordered_map<int32_t, int> seen_;  // how often each token is in the sequence; empty without a penalty
    LogitRow row_;
    RankedRow ranked_;
    // Work space.
    std::vector<double> held_;         // the weight in each bucket of the nucleus
    std::vector<BlockWeight> blocks_;  // those that hold kept tokens
};

}  // namespace tinyloop
