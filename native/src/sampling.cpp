#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tinyloop {
namespace {

// e^x for x <= 0 in plain multiplications and additions, so that no two maths libraries can disagree on a draw.
double exp_negative(double x) {
    if (x < -700) return 0;
    const double n = std::nearbyint(x * 1.4426950408889634);
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double p = 1;
    for (int i = 14; i > 0; --i) p = 1 + p * r / i;
    return std::ldexp(p, static_cast<int>(n));
}

[[noreturn]] void bad(const char* field, const std::string& value, const char* accepted) {
    refuse(ErrorKind::config, field, value, accepted);
}

}  // namespace

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC11).
double uniform_draw(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
        std::memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9;
        k[1] += 0xBB67AE85;
    }
    return static_cast<double>((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

void check_sampling(const GenerateConfig& c) {
    if (!(c.temperature >= 0 && c.temperature <= 100))
        bad("temperature", std::to_string(c.temperature), "0 (greedy) to 100");
    if (c.top_k < 0) bad("top_k", std::to_string(c.top_k), "0 (off) or more");
    if (!(c.top_p > 0 && c.top_p <= 1)) bad("top_p", std::to_string(c.top_p), "more than 0, at most 1");
    if (!(c.min_p >= 0 && c.min_p <= 1)) bad("min_p", std::to_string(c.min_p), "0 to 1");
    if (!(c.repetition_penalty > 0 && c.repetition_penalty <= 100))
        bad("repetition_penalty", std::to_string(c.repetition_penalty), "more than 0, at most 100");
}

Sampler::Sampler(const GenerateConfig& c, int vocab_size)
    : temperature_(c.temperature),
      top_p_(c.top_p),
      min_p_(c.min_p),
      repetition_penalty_(static_cast<float>(c.repetition_penalty)),
      top_k_(c.top_k),
      seed_(c.seed),
      seen_(static_cast<size_t>(vocab_size)) {}

void log_softmax(const float* logits, int n, double* out) {
    const double top = *std::max_element(logits, logits + n);
    double total = 0;
    for (int i = 0; i < n; ++i) total += exp_negative(logits[i] - top);
    const double offset = top + std::log(total);
    for (int i = 0; i < n; ++i) out[i] = logits[i] - offset;
}

void Sampler::penalize(float* logits) const {
    if (repetition_penalty_ == 1) return;
    for (size_t id = 0; id < seen_.size(); ++id)
        if (seen_[id])
            logits[id] = logits[id] > 0 ? logits[id] / repetition_penalty_ : logits[id] * repetition_penalty_;
}

int32_t Sampler::sample(float* logits, int position, const uint32_t* allowed) {
    const int vocab = static_cast<int>(seen_.size());
    auto may = [allowed](int id) { return !allowed || (allowed[id / 32] >> (id % 32) & 1); };
    penalize(logits);
    int best = -1;
    for (int id = 0; id < vocab; ++id)
        if (may(id) && (best < 0 || logits[id] > logits[best])) best = id;
    if (temperature_ == 0 || best < 0) return best;

    const double top = logits[best];
    candidates_.clear();
    for (int id = 0; id < vocab; ++id)
        if (may(id)) candidates_.push_back({id, logits[id], exp_negative((logits[id] - top) / temperature_)});
    if (candidates_.size() == 1) return best;
    auto ranks_before = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    if (top_k_ > 0 && top_k_ < static_cast<int>(candidates_.size())) {
        std::nth_element(candidates_.begin(), candidates_.begin() + top_k_ - 1, candidates_.end(), ranks_before);
        candidates_.resize(top_k_);
    }
    if (top_p_ < 1) {  // the smallest set of the likeliest tokens that holds top_p of the weight
        std::sort(candidates_.begin(), candidates_.end(), ranks_before);
        double total = 0, held = 0;
        for (const Candidate& c : candidates_) total += c.weight;
        size_t kept = 0;
        while (kept < candidates_.size() && held < top_p_ * total) held += candidates_[kept++].weight;
        candidates_.resize(std::max<size_t>(kept, 1));
    }
    if (min_p_ > 0)
        std::erase_if(candidates_, [this](const Candidate& c) { return c.weight < min_p_; });  // the best has weight 1
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });

    double total = 0;
    for (const Candidate& c : candidates_) total += c.weight;
    const double target = uniform_draw(seed_, static_cast<uint64_t>(position)) * total;
    double passed = 0;
    for (const Candidate& c : candidates_) {
        passed += c.weight;
        if (target < passed) return c.id;
    }
    return best;  // rounding left the target at the very end
}

}  // namespace tinyloop
