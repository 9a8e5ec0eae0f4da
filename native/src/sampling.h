// From logits to a token, on the host: a pure function of (logits, tokens so far, config, position).
#pragma once
#include <cstdint>
#include <vector>

#include "tinyloop/engine.h"

namespace tinyloop {

// A uniform number in [0, 1) that depends on nothing but its arguments.
double uniform_draw(uint64_t seed, uint64_t position);

// (n) log-probabilities of logits, in plain arithmetic but for one logarithm.
void log_softmax(const float* logits, int n, double* out);

// Throws Error(config) naming the field.
void check_sampling(const GenerateConfig& config);

// One lane's sampler.
//
// Order: repetition penalty (Keskar et al., arXiv 1909.05858: logits of tokens already in the sequence are divided by
// it when positive, multiplied when negative), temperature, top-k, top-p (Holtzman et al., arXiv 1904.09751), min-p
// (Nguyen et al., arXiv 2407.01082), then the inverse of the cumulative distribution over the kept tokens in id order.
// Equal logits rank by id, so the result never depends on how a sort treats ties.
class Sampler {
  public:
    Sampler(const GenerateConfig& config, int vocab_size);

    // The token is in the sequence now, or (a rejected draft) no longer.
    void saw(int32_t token) { ++seen_[static_cast<size_t>(token)]; }
    void unsaw(int32_t token) { --seen_[static_cast<size_t>(token)]; }
    // `logits` (vocab_size) is used as work space. `position`: of the token to sample in the whole sequence. `allowed`:
    // a bit per token, or null.
    int32_t sample(float* logits, int position, const uint32_t* allowed = nullptr);
    void penalize(float* logits) const;

  private:
    struct Candidate {
        int32_t id;
        float logit;
        double weight;
    };

    const double temperature_, top_p_, min_p_;
    const float repetition_penalty_;
    const int top_k_;
    const uint64_t seed_;
    std::vector<int32_t> seen_;          // (vocab_size) how often each token is in the sequence
    std::vector<Candidate> candidates_;  // work space
};

}  // namespace tinyloop
