#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tinyloop {
namespace {

constexpr int kBuckets = 4096;  // of the nucleus: slices of the reach, equal in (top - logit)

// Leaves no logit to tokens without their bit.
void forbid(float* logits, int count, const uint32_t* allowed) {
    for (int begin = 0; begin < count; begin += 32) {
        const uint32_t word = allowed[begin / 32];
        const int here = std::min(32, count - begin);
        if (word == 0)
            std::fill_n(logits + begin, here, -std::numeric_limits<float>::infinity());
        else if (word != 0xFFFFFFFF)
            for (int i = 0; i < here; ++i)
                logits[begin + i] = word >> i & 1 ? logits[begin + i] : -std::numeric_limits<float>::infinity();
    }
}

// The first token that may come, whatever its logit; -1: none.
int32_t first_of(const uint32_t* allowed, int count) {
    int32_t id = 0;
    while (allowed && id < count && !(allowed[id / 32] >> (id % 32) & 1)) ++id;
    return id < count ? id : -1;
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
    : temperature_(c.temperature == 0 ? 0 : std::max(c.temperature, 1e-60)),  // its inverse must be finite
      top_p_(c.top_p),
      min_p_(c.min_p),
      repetition_penalty_(static_cast<float>(c.repetition_penalty)),
      top_k_(c.top_k),
      vocab_size_(vocab_size),
      seed_(c.seed) {}

void Sampler::saw(int32_t token) {
    if (repetition_penalty_ != 1) ++seen_[token];
}

void Sampler::unsaw(int32_t token) {
    if (repetition_penalty_ == 1) return;
    const auto at = seen_.find(token);
    if (--at->second == 0) seen_.erase(at);
}

void Sampler::penalize(float* logits) const {
    for (const auto& [id, count] : seen_)
        logits[id] = logits[id] > 0 ? logits[id] / repetition_penalty_ : logits[id] * repetition_penalty_;
}

int Sampler::decisive(int most) const {
    if (repetition_penalty_ != 1) return 0;  // it may bring any token to the front
    const int count = temperature_ == 0 ? 1 : top_k_;
    return count <= most ? count : 0;
}

int32_t Sampler::sample(const RowLogits& logits, int position, const uint32_t* allowed) {
    if (logits.count > 0) {
        ranked_.read(logits.first, logits.count);
        return ranked_.best() >= 0 ? choose(ranked_, position) : first_of(nullptr, vocab_size_);
    }
    penalize(logits.whole);
    if (allowed) forbid(logits.whole, vocab_size_, allowed);
    row_.read(logits.whole, vocab_size_);
    return row_.best() >= 0 ? choose(row_, position) : first_of(allowed, vocab_size_);
}

template <class Row>
int32_t Sampler::choose(Row& row, int position) {
    if (temperature_ == 0 || !std::isfinite(row.top())) return row.best();
    Rank last{floor_of(row.top(), 0), vocab_size_};
    if (top_k_ > 0 && top_k_ < vocab_size_) last = row.nth(top_k_, last);
    if (top_p_ < 1) last = nucleus(row, last);
    if (const float floor = floor_of(row.top(), min_p_); floor > last.logit) last = {floor, vocab_size_};
    return draw(row, last, uniform_draw(seed_, static_cast<uint64_t>(position)));
}

// No logit below it has more than `least_weight`, nor a weight that counts.
float Sampler::floor_of(float top, double least_weight) const {
    const double reach = least_weight > 0 ? std::min(kReach, 1e-3 - std::log(least_weight)) : kReach;
    return static_cast<float>(std::max(-3e38, top - reach * temperature_));
}

// The last token of the smallest set of the likeliest, up to `last`, that holds top_p of their weight. Buckets are in
// order of rank, so only the tokens of the bucket in which the set ends are sorted.
template <class Row>
Rank Sampler::nucleus(const Row& row, const Rank& last) {
    const double top = row.top(), per_logit = kBuckets / (kReach * temperature_);
    auto bucket_of = [=](float logit) { return std::min(kBuckets - 1, static_cast<int>((top - logit) * per_logit)); };
    double weights[kBlock];
    int buckets[kBlock];
    held_.assign(kBuckets, 0);
    row.each_block(last, [&](const int32_t*, const float* logits, int count) {
        weigh(logits, count, top, temperature_, weights);
        for (int i = 0; i < count; ++i) buckets[i] = bucket_of(logits[i]);
        for (int i = 0; i < count; ++i) held_[static_cast<size_t>(buckets[i])] += weights[i];
    });
    double total = 0;
    for (const double held : held_) total += held;
    const double wanted = top_p_ * total;
    double held = 0;
    int bucket = 0;
    while (held + held_[static_cast<size_t>(bucket)] < wanted) held += held_[static_cast<size_t>(bucket++)];

    std::vector<Rank> ends;
    const float after = static_cast<float>(top - (bucket + 2) / per_logit);  // a bucket of room for the rounding
    const Rank end = after > last.logit ? Rank{after, vocab_size_} : last;
    row.each_block(end, [&](const int32_t* ids, const float* logits, int count) {
        for (int i = 0; i < count; ++i)
            if (bucket_of(logits[i]) == bucket) ends.push_back({logits[i], ids[i]});
    });
    std::sort(ends.begin(), ends.end(), before);
    for (const Rank& token : ends) {
        weigh(&token.logit, 1, top, temperature_, weights);
        held += weights[0];
        if (held >= wanted) return token;
    }
    return ends.back();
}

// The token at which the running sum of the weights up to `last`, in id order, passes `share` of their total.
template <class Row>
int32_t Sampler::draw(const Row& row, const Rank& last, double share) {
    double weights[kBlock];
    auto weigh_kept = [&](const float* logits, int count) {
        weigh(logits, count, row.top(), temperature_, weights);
        for (int i = 0; i < count; ++i) weights[i] = weights[i] < min_p_ ? 0 : weights[i];
    };
    blocks_.clear();
    double total = 0;
    row.each_block(last, [&](const int32_t* ids, const float* logits, int count) {
        weigh_kept(logits, count);
        blocks_.push_back({ids[0] / kBlock, sum(weights, count)});
        total += blocks_.back().weight;
    });
    const double target = share * total;
    double passed = 0;
    size_t at = 0;
    while (at + 1 < blocks_.size() && passed + blocks_[at].weight <= target) passed += blocks_[at++].weight;

    int32_t ids[kBlock], token = row.best();
    float logits[kBlock];
    const int count = row.gather(blocks_[at].index, last, ids, logits);
    weigh_kept(logits, count);
    for (int i = 0; i < count; ++i) {
        if (weights[i] == 0) continue;
        token = ids[i];  // the last one stands where rounding leaves the target at the very end
        passed += weights[i];
        if (target < passed) break;
    }
    return token;
}

double log_sum_exp(const LogitRow& row) {
    double total = 0, weights[kBlock];
    const Rank last{static_cast<float>(row.top() - kReach), row.count()};
    row.each_block(last, [&](const int32_t*, const float* logits, int count) {
        weigh(logits, count, row.top(), 1, weights);
        total += sum(weights, count);
    });
    return row.top() + std::log(total);
}

}  // namespace tinyloop
