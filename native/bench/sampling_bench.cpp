// Microseconds per sampled token, by vocabulary and by what is asked. Logits: a bell curve and a few favourites, as a
// language model's are.
//   scripts/cpp-tests; cmake --build build/native --target sampling_bench; build/native/sampling_bench
#include "sampling.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "../tests/sampling_case.h"

using namespace tinyloop;

namespace {

struct Case {
    const char* name;
    double temperature = 0;
    int top_k = 0;
    double top_p = 1, min_p = 0, repetition_penalty = 1;
    bool masked = false;
};

constexpr Case kCases[] = {
    {"greedy"},
    {"greedy, penalty over 1000 tokens", 0, 0, 1, 0, 1.1},
    {"greedy, grammar mask", 0, 0, 1, 0, 1, true},
    {"temperature 1", 1},
    {"temperature 1, grammar mask", 1, 0, 1, 0, 1, true},
    {"top_k 50", 1, 50},
    {"top_p 0.9", 1, 0, 0.9},
    {"top_p 0.99, temperature 3", 3, 0, 0.99},
    {"top_k 50, top_p 0.9", 1, 50, 0.9},
    {"min_p 0.05", 1, 0, 1, 0.05},
};

std::vector<float> logits_of(int vocab, uint64_t seed) {
    std::vector<float> out(static_cast<size_t>(vocab));
    for (int id = 0; id < vocab; ++id) {
        double sum = 0;
        for (uint64_t part = 0; part < 4; ++part) sum += uniform_draw(seed + part, static_cast<uint64_t>(id)) - 0.5;
        out[static_cast<size_t>(id)] = static_cast<float>(4 * sum);
    }
    for (uint64_t i = 0; i < 20; ++i)
        out[static_cast<size_t>(uniform_draw(seed + 9, i) * vocab)] =
            static_cast<float>(12 + 3 * uniform_draw(seed, i));
    return out;
}

double microseconds(const Case& c, int vocab) {
    const GenerateConfig config = config_of(c);
    Sampler sampler(config, vocab);
    for (uint64_t i = 0; i < 1000; ++i) sampler.saw(static_cast<int32_t>(uniform_draw(5, i) * vocab));
    std::vector<uint32_t> mask(static_cast<size_t>(vocab + 31) / 32);
    for (size_t i = 0; i < mask.size(); i += 3) mask[i] = 0x10204081;
    std::vector<std::vector<float>> rows;
    for (uint64_t seed = 0; seed < 8; ++seed) rows.push_back(logits_of(vocab, seed * 100));
    std::vector<float> work(static_cast<size_t>(vocab));
    std::vector<double> times;
    for (int round = 0; round < 64; ++round) {
        work = rows[static_cast<size_t>(round) % rows.size()];
        const auto start = std::chrono::steady_clock::now();
        sampler.sample({work.data()}, round, c.masked ? mask.data() : nullptr);
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    }
    std::nth_element(times.begin(), times.begin() + 32, times.end());
    return times[32];
}

}  // namespace

int main() {
    constexpr int kVocabularies[] = {8192, 32000, 49152, 151936};
    std::printf("%-36s", "us per token (median of 64)");
    for (const int vocab : kVocabularies) std::printf("%10d", vocab);
    for (const Case& c : kCases) {
        std::printf("\n%-36s", c.name);
        for (const int vocab : kVocabularies) std::printf("%10.1f", microseconds(c, vocab));
    }
    std::printf("\n");
}
