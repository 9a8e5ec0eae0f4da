// The sampler against its definition, written plainly with sorts (reference, below), over random and degenerate logits;
// against tokens that were recorded before it stopped sorting; and from the first in rank against all logits.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "sampling_case.h"

using namespace tinyloop;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
    int vocab;
    double temperature;
    int top_k;
    double top_p, min_p, repetition_penalty;
    int shape;    // of the logits, see draw_logits
    bool masked;  // a grammar
};

// Plain arithmetic only, so that every machine makes the same ones.
std::vector<float> draw_logits(int vocab, int shape, uint64_t seed) {
    std::vector<float> out(static_cast<size_t>(vocab));
    for (int id = 0; id < vocab; ++id) {
        double sum = 0;
        for (uint64_t part = 0; part < 4; ++part) sum += uniform_draw(seed + part, static_cast<uint64_t>(id)) - 0.5;
        float& logit = out[static_cast<size_t>(id)];
        switch (shape) {
            case 0:  // a bell curve with favourites, like a language model's
                logit = static_cast<float>(4 * sum);
                if (id % 97 == 5) logit += static_cast<float>(8 * uniform_draw(seed + 7, static_cast<uint64_t>(id)));
                break;
            case 1:  // many ties
                logit = static_cast<float>(std::nearbyint(sum * 3)) * 0.5f;
                break;
            case 2:  // all the same
                logit = 1.5f;
                break;
            default:  // steep, some impossible
                logit = id % 3 == 1 ? -kInfinity : static_cast<float>(60 * sum);
        }
    }
    return out;
}

std::vector<uint32_t> draw_mask(int vocab, uint64_t seed) {
    std::vector<uint32_t> words(static_cast<size_t>(vocab + 31) / 32);
    for (size_t i = 0; i < words.size(); ++i) {
        const uint64_t kind = static_cast<uint64_t>(4 * uniform_draw(seed, i));
        words[i] = kind == 0   ? 0
                   : kind == 1 ? 0xFFFFFFFF
                               : static_cast<uint32_t>(4294967296.0 * uniform_draw(seed + 1, i));
    }
    for (int id = vocab; id < static_cast<int>(words.size()) * 32; ++id)  // bits that no token has
        words[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
    return words;
}

std::vector<int32_t> seen_tokens(int vocab, uint64_t seed) {
    std::vector<int32_t> out;
    for (uint64_t i = 0; i < 12; ++i) out.push_back(static_cast<int32_t>(uniform_draw(seed + 3, i) * vocab));
    return out;
}

// The definition: penalty, temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution in id
// order. Equal logits rank by id.
int32_t reference(std::vector<float> logits, const Case& c, uint64_t seed, int position, std::vector<int32_t> seen,
                  const uint32_t* allowed) {
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    const float penalty = static_cast<float>(c.repetition_penalty);
    for (const int32_t id : seen) {
        float& logit = logits[static_cast<size_t>(id)];
        if (penalty != 1) logit = logit > 0 ? logit / penalty : logit * penalty;
    }
    struct Token {
        int32_t id;
        float logit;
        double weight;
    };
    std::vector<Token> kept;
    for (int32_t id = 0; id < c.vocab; ++id)
        if (!allowed || allowed[id / 32] >> (id % 32) & 1) kept.push_back({id, logits[static_cast<size_t>(id)], 0});
    if (kept.empty()) return -1;
    std::stable_sort(kept.begin(), kept.end(), [](const Token& a, const Token& b) { return a.logit > b.logit; });
    const Token best = kept[0];
    if (c.temperature == 0 || kept.size() == 1 || best.logit == -kInfinity) return best.id;
    for (Token& t : kept) t.weight = std::exp((double(t.logit) - best.logit) / c.temperature);
    if (c.top_k > 0 && c.top_k < static_cast<int>(kept.size())) kept.resize(static_cast<size_t>(c.top_k));
    double total = 0, held = 0;
    for (const Token& t : kept) total += t.weight;
    if (c.top_p < 1) {
        size_t count = 0;
        while (count < kept.size() && held < c.top_p * total) held += kept[count++].weight;
        kept.resize(std::max<size_t>(count, 1));
    }
    std::erase_if(kept, [&](const Token& t) { return t.weight < c.min_p; });
    std::sort(kept.begin(), kept.end(), [](const Token& a, const Token& b) { return a.id < b.id; });
    total = 0;
    for (const Token& t : kept) total += t.weight;
    const double target = uniform_draw(seed, static_cast<uint64_t>(position)) * total;
    double passed = 0;
    for (const Token& t : kept)
        if (target < (passed += t.weight)) return t.id;
    return best.id;
}

int32_t sampled(const Case& c, uint64_t seed, int position, std::vector<float> logits, const std::vector<int32_t>& seen,
                const uint32_t* allowed) {
    Sampler sampler(config_of(c, seed), c.vocab);
    for (const int32_t token : seen) sampler.saw(token);
    return sampler.sample({logits.data()}, position, allowed);
}

void test_definition() {
    int tried = 0, wrong = 0;
    for (const int vocab : {1, 2, 15, 16, 17, 255, 256, 257, 1000, 4096, 5000})
        for (int shape = 0; shape < 4; ++shape)
            for (const double temperature : {0.0, 0.01, 0.7, 1.0, 3.0, 100.0})
                for (const int top_k : {0, 1, 2, 40, 900, 10000})
                    for (const double top_p : {1.0, 0.3, 0.9, 0.999, 1e-9})
                        for (const double min_p : {0.0, 0.05, 1.0}) {
                            const uint64_t seed = static_cast<uint64_t>(++tried);
                            const double penalty = tried % 3 == 0 ? 1.3 : 1;
                            const bool masked = tried % 4 == 1;
                            const Case c{vocab, temperature, top_k, top_p, min_p, penalty, shape, masked};
                            const std::vector<float> logits = draw_logits(vocab, shape, seed % 50);
                            const std::vector<uint32_t> mask = draw_mask(vocab, seed);
                            const std::vector<int32_t> seen = seen_tokens(vocab, seed);
                            const uint32_t* allowed = masked ? mask.data() : nullptr;
                            const int32_t expected = reference(logits, c, seed, tried, seen, allowed);
                            if (sampled(c, seed, tried, logits, seen, allowed) == expected) continue;
                            if (++wrong < 10)
                                std::printf(
                                    "vocab %d shape %d temperature %g top_k %d top_p %g min_p %g penalty %g %s\n",
                                    vocab, shape, temperature, top_k, top_p, min_p, penalty, masked ? "masked" : "");
                        }
    CHECK(tried > 20000 && wrong == 0);
}

// FNV-1a of the tokens at 400 positions.
uint64_t recorded(const Case& c) {
    uint64_t hash = 0xcbf29ce484222325;
    for (int position = 0; position < 400; ++position) {
        const uint64_t seed = static_cast<uint64_t>(position % 20);
        const std::vector<uint32_t> mask = draw_mask(c.vocab, seed + 1000);
        const int32_t token = sampled(c, seed, position, draw_logits(c.vocab, c.shape, seed),
                                      seen_tokens(c.vocab, seed), c.masked ? mask.data() : nullptr);
        hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001b3;
    }
    return hash;
}

void test_recorded() {
    constexpr struct {
        Case what;
        uint64_t tokens;
    } kRecorded[] = {
        {{500, 0, 0, 1, 0, 1, 0, false}, 0x3a475c715ee7b5dd},
        {{500, 0, 0, 1, 0, 1.2, 1, true}, 0xb17fd886cca5c6a5},
        {{1000, 1, 0, 1, 0, 1, 0, false}, 0x5f286d32eca56bf5},
        {{1000, 0.7, 0, 1, 0, 1.2, 0, true}, 0x2a77d8c067e4264a},
        {{1000, 1, 20, 1, 0, 1, 1, false}, 0xaa1f47e9fa2d2617},
        {{1000, 1.3, 700, 1, 0, 1.1, 0, false}, 0x482a770a194cc3a9},
        {{1000, 1, 0, 0.9, 0, 1, 0, false}, 0x45a02112b50794b6},
        {{1000, 2, 0, 0.99, 0, 1, 1, true}, 0x503312852352f16c},
        {{1000, 1, 40, 0.8, 0, 1, 0, false}, 0x751846bd374c5079},
        {{1000, 1, 0, 1, 0.05, 1, 0, false}, 0xe9aaf7977402a82b},
        {{1000, 0.8, 100, 0.95, 0.02, 1.1, 0, true}, 0xf77f988d7b948d33},
        {{1000, 1, 0, 0.5, 0, 1, 2, false}, 0x44a7935a96252d54},
        {{1000, 1, 0, 0.9, 0, 1, 3, false}, 0x20b9010e4f3a5cd6},
        {{5000, 1, 0, 1, 0, 1, 0, false}, 0xb62e0da9ff9a4178},
    };
    for (const auto& [what, tokens] : kRecorded) {
        const uint64_t found = recorded(what);
        if (found != tokens) std::printf("0x%016llx\n", static_cast<unsigned long long>(found));
        CHECK(found == tokens);
    }
}

void test_rows() {
    for (const int vocab : {1, 31, 257, 3000})
        for (int shape = 0; shape < 4; ++shape) {
            const std::vector<float> logits = draw_logits(vocab, shape, 11);
            LogitRow row;
            row.read(logits.data(), vocab);
            std::vector<Rank> ranks;
            double total = 0;
            for (int32_t id = 0; id < vocab; ++id) {
                ranks.push_back({logits[static_cast<size_t>(id)], id});
                total += std::exp(double(logits[static_cast<size_t>(id)]) - row.top());
            }
            std::sort(ranks.begin(), ranks.end(), before);
            CHECK(row.best() == ranks[0].id && row.top() == ranks[0].logit);
            CHECK(std::fabs(log_sum_exp(row) - row.top() - std::log(total)) < 1e-12);
            for (const int count : {1, 2, 16, 300, 5000}) {
                const std::vector<Rank> first = row.first(count);
                CHECK(first.size() == static_cast<size_t>(std::min(count, vocab)));
                for (size_t i = 0; i < first.size(); ++i) CHECK(first[i].id == ranks[i].id);
            }
        }
}

// As a backend picks them out (backend.h).
std::vector<Rank> first_of(const std::vector<float>& logits, int count) {
    std::vector<Rank> ranks;
    for (size_t id = 0; id < logits.size(); ++id)
        if (logits[id] > -kInfinity) ranks.push_back({logits[id], static_cast<int32_t>(id)});
    std::sort(ranks.begin(), ranks.end(), before);
    ranks.resize(static_cast<size_t>(count), {-kInfinity, -1});
    return ranks;
}

int32_t sampled_from_first(const Case& c, uint64_t seed, int position, const std::vector<float>& logits, int more) {
    Sampler sampler(config_of(c, seed), c.vocab);
    const int count = sampler.decisive(128) + more;
    std::vector<Rank> first = first_of(logits, count);
    return sampler.sample({nullptr, first.data(), count}, position);
}

// The first in rank give the token that all logits give.
void test_first_in_rank() {
    int tried = 0, wrong = 0;
    for (const int vocab : {1, 100, 3000})
        for (int shape = 0; shape < 4; ++shape) {
            const std::vector<float> logits = draw_logits(vocab, shape, 23);
            for (int top_k = 1; top_k <= 128; ++top_k)
                for (const double temperature : {0.0, 0.7, 30.0})
                    for (const double top_p : {1.0, 0.8}) {
                        const uint64_t seed = static_cast<uint64_t>(++tried);
                        const Case c{vocab, temperature, top_k, top_p, tried % 3 ? 0.0 : 0.04, 1, shape, false};
                        const int32_t expected = sampled(c, seed, tried, logits, {}, nullptr);
                        wrong += sampled_from_first(c, seed, tried, logits, tried % 4) != expected;
                    }
        }
    CHECK(tried > 9000 && wrong == 0);

    std::vector<float> odd(300, -kInfinity);
    const Case greedy{300, 0, 0, 1, 0, 1, 0, false}, warm{300, 1, 40, 1, 0, 1, 0, false};
    const auto same = [&](int32_t expected) {
        for (const Case& c : {greedy, warm}) {
            CHECK(sampled(c, 1, 1, odd, {}, nullptr) == expected);
            CHECK(sampled_from_first(c, 1, 1, odd, 0) == expected);
        }
    };
    same(0);
    odd[7] = std::nanf("");
    same(0);
    odd[260] = -2;
    same(260);
    odd[290] = odd[280] = kInfinity;
    same(280);

    const auto decisive = [](double temperature, int top_k, double penalty, int most) {
        const Case c{300, temperature, top_k, 1, 0, penalty, 0, false};
        return Sampler(config_of(c), c.vocab).decisive(most);
    };
    CHECK(decisive(0, 0, 1, 128) == 1 && decisive(0, 50, 1, 128) == 1 && decisive(1, 50, 1, 128) == 50);
    CHECK(decisive(1, 0, 1, 128) == 0 && decisive(1, 129, 1, 128) == 0 && decisive(0, 0, 1.1, 128) == 0);
    CHECK(decisive(0, 0, 1, 0) == 0);
}

// A token that is dropped is behind all others, in either form.
void test_dropped() {
    std::vector<float> logits = {1, 5, 3, 4};
    std::vector<Rank> first = first_of(logits, 3);
    const RowLogits all{logits.data()}, some{nullptr, first.data(), 3};
    for (const RowLogits& row : {all, some})
        for (const int32_t token : {1, 3}) row.drop(token);
    CHECK(logits[1] < -1e38f && logits[3] < -1e38f && logits[2] == 3);
    CHECK(first[0].id == 2 && first[0].logit == 3 && first[1].id == 1 && first[2].id == 3 && first[1].logit < -1e38f);
}

// A token that is taken back leaves no trace in the penalty, one that was there twice stays.
void test_taken_back() {
    Case c{4, 0, 0, 1, 0, 4, 0, false};
    Sampler sampler(config_of(c, 0), c.vocab);
    for (const int32_t token : {1, 2, 2, 3}) sampler.saw(token);
    sampler.unsaw(2);
    sampler.unsaw(3);
    std::vector<float> logits = {1, 8, 8, -1};
    sampler.penalize(logits.data());
    CHECK((logits == std::vector<float>{1, 2, 2, -1}));
}

// What has no weight is never drawn, and a row without a finite best one has an answer all the same.
void test_degenerate() {
    const Case c{300, 1, 0, 0.9, 0, 1, 0, false};
    std::vector<float> logits(300, -kInfinity);
    std::vector<uint32_t> mask(10);
    CHECK(sampled(c, 1, 1, logits, {}, mask.data()) == -1);
    mask[2] = 1u << 3;
    CHECK(sampled(c, 1, 1, logits, {}, mask.data()) == 67 && sampled(c, 1, 1, logits, {}, nullptr) == 0);
    logits[290] = kInfinity;
    CHECK(sampled(c, 1, 1, logits, {}, nullptr) == 290);
    logits[290] = std::nanf("");
    logits[200] = -5;
    CHECK(sampled(c, 1, 1, logits, {}, nullptr) == 200);
    Case cold = c;
    cold.temperature = 1e-320;
    logits[100] = logits[200];
    int hundreds = 0;
    for (int position = 0; position < 100; ++position) {
        const int32_t token = sampled(cold, 3, position, logits, {}, nullptr);
        hundreds += token == 100;
        CHECK(token == 100 || token == 200);
    }
    CHECK(hundreds > 20 && hundreds < 80);
}

}  // namespace

int main() {
    test_rows();
    test_taken_back();
    test_first_in_rank();
    test_dropped();
    test_degenerate();
    test_definition();
    test_recorded();
    return finish();
}
