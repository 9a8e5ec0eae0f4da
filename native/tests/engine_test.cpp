// The promise on bits, the contracts, and rows at different loops, on a tiny random model.
#include "tinyloop/engine.h"

#include <cmath>
#include <cstring>

#include "check.h"
#include "model.h"
#include "sampling.h"
#include "tiny_model.h"

using namespace tinyloop;
using namespace tiny;

namespace {

// Logits and tokens are the same bits over threads, chunks and SIMD levels.
void test_axes(const std::string& path) {
    const std::vector<int32_t> prompt = prompt_of(45, 3);
    std::vector<float> first;
    std::vector<int32_t> first_tokens;
    const std::vector<std::string> levels = simd_levels();
    for (const std::string& simd : levels)
        for (const int threads : {1, 2, 4})
            for (const int chunk : {1, 7, 64}) {
                if (simd != levels[0] && (threads == 4 || chunk != 7))
                    continue;  // slow, and the kernels' tests are thorough
                Model* model = load_model(path, options_of(threads, chunk, simd));
                const std::vector<float> found = logits(model, prompt.data(), prompt.size(), 5);
                const std::vector<int32_t> tokens =
                    generate(model, prompt.data(), prompt.size(), sampled(9, 30)).tokens;
                if (first.empty()) {
                    first = found;
                    first_tokens = tokens;
                }
                CHECK(std::memcmp(found.data(), first.data(), first.size() * 4) == 0);
                CHECK(tokens == first_tokens);
                free_model(model);
            }
}

// A model in panels is the same model in rows; the engine computes in the file's own pages, also when it is gone.
void test_layouts(const std::string& config) {
    const File rows(bytes(config)), panels(bytes(config, Layout::panels));
    const std::vector<int32_t> prompt = prompt_of(20, 3);
    Model* copied = load_model(rows.path(), options_of(1, 16));
    Model* in_place = load_model(panels.path(), options_of(2, 16));
    CHECK(::unlink(panels.path().c_str()) == 0);
    CHECK(artifact(copied).parameters == artifact(in_place).parameters);
    const std::vector<float> one = logits(copied, prompt.data(), prompt.size(), 4);
    const std::vector<float> other = logits(in_place, prompt.data(), prompt.size(), 4);
    CHECK(std::memcmp(one.data(), other.data(), one.size() * 4) == 0);
    free_model(copied);
    free_model(in_place);
    for (const auto& [layout, weights] : {std::pair{Layout::int8, "int8"}, {Layout::int4, "int4"}}) {
        const File integers(bytes(config, layout));
        LoadOptions options = options_of(2, 16);
        Model* stored = load_model(integers.path(), options);
        CHECK(weight_format(stored) == weights);
        options.weights = weights;
        const File floats(bytes(config, Layout::panels));
        Model* quantised = load_model(floats.path(), options);
        const std::vector<float> a = logits(stored, prompt.data(), prompt.size(), 4);
        const std::vector<float> b = logits(quantised, prompt.data(), prompt.size(), 4);
        CHECK(std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
        free_model(stored);
        free_model(quantised);
    }
}

// A lane's tokens do not depend on the batch, the order of lanes, or how the others stop.
void test_batch(const std::string& path) {
    Model* model = load_model(path, options_of(2, 16));
    std::vector<std::vector<int32_t>> prompts;
    std::vector<GenerateConfig> configs;
    std::vector<std::vector<int32_t>> alone;
    for (int lane = 0; lane < 9; ++lane) {
        prompts.push_back(prompt_of(3 + 7 * lane, lane));
        configs.push_back(sampled(100 + lane, 1 + 3 * lane));
        alone.push_back(generate(model, prompts[lane].data(), prompts[lane].size(), configs[lane]).tokens);
        CHECK(static_cast<int>(alone.back().size()) == 1 + 3 * lane);
    }
    std::vector<Generation> together = generate_batch(model, prompts, configs);
    for (int lane = 0; lane < 9; ++lane) CHECK(together[lane].tokens == alone[lane]);
    for (const size_t size : {1, 2, 5}) {  // reversed, in smaller batches
        for (size_t begin = 0; begin < 9; begin += size) {
            std::vector<std::vector<int32_t>> some;
            std::vector<GenerateConfig> some_configs;
            for (size_t i = begin; i < std::min<size_t>(9, begin + size); ++i) {
                some.push_back(prompts[8 - i]);
                some_configs.push_back(configs[8 - i]);
            }
            const std::vector<Generation> part = generate_batch(model, some, some_configs);
            for (size_t i = 0; i < part.size(); ++i) CHECK(part[i].tokens == alone[8 - begin - i]);
        }
    }
    // Cancelling a lane at a step leaves the others alone.
    int steps = 0;
    const std::vector<Generation> cancelled =
        generate_batch(model, prompts, configs, [&](const std::vector<int32_t>&, std::vector<bool>& cancel) {
            if (++steps == 4) cancel[8] = true;
            return true;
        });
    CHECK(cancelled[8].stats.stop_reason == "cancelled" && cancelled[8].tokens.size() == 4);
    CHECK(std::equal(cancelled[8].tokens.begin(), cancelled[8].tokens.end(), alone[8].begin()));
    for (int lane = 0; lane < 8; ++lane) CHECK(cancelled[lane].tokens == alone[lane]);
    free_model(model);
}

// Rows that go on from saved states at their own loop equal a run from the start: what resuming and verifying need.
void test_rows_at_different_loops(const std::string& path) {
    Model* model = load_model(path, options_of(2, 64));
    const std::vector<int32_t> prompt = prompt_of(20, 5);
    const int vocab = artifact(model).config.vocab_size;
    const std::vector<float> whole = logits(model, prompt.data(), prompt.size(), 6);
    const Cache cache = model->make_cache(20, 6), other = model->make_cache(20, 6);
    const States states = model->make_states(20);
    auto row = [&](int lane, int p, int begin, int end, uint32_t flags) {
        return tl_row{lane, p, p, p, 1, prompt[p], begin, end, lane == 0 ? p : -1, flags, 0, 0};
    };

    std::vector<tl_row> rows;
    for (int p = 0; p < 20; ++p) rows.push_back(row(0, p, 0, 2, 0));
    model->forward({cache.get(), other.get()}, states.get(), rows, {});
    // Lane 0 goes on at loop 2, lane 1 starts at loop 0, in one pass and interleaved.
    std::vector<float> out(static_cast<size_t>(40) * vocab);
    rows.clear();
    for (int p = 0; p < 20; ++p) {
        rows.push_back(row(0, p, 2, 6, TL_ROW_LOGITS));
        rows.push_back(row(1, p, 0, 6, TL_ROW_LOGITS));
    }
    model->forward({cache.get(), other.get()}, states.get(), rows, {out.data()});
    for (int p = 0; p < 20; ++p) {
        CHECK(std::memcmp(&out[static_cast<size_t>(2 * p) * vocab], &whole[static_cast<size_t>(p) * vocab],
                          vocab * 4) == 0);
        CHECK(std::memcmp(&out[static_cast<size_t>(2 * p + 1) * vocab], &whole[static_cast<size_t>(p) * vocab],
                          vocab * 4) == 0);
    }
    free_model(model);
}

void test_contracts(const std::string& path) {
    Model* model = load_model(path, 0);
    const std::vector<int32_t> prompt = prompt_of(10, 1);
    auto with = [&](auto change) {
        GenerateConfig config;
        config.max_tokens = 4;
        change(config);
        return [&model, &prompt, config] { generate(model, prompt.data(), prompt.size(), config); };
    };
    const uint64_t before = step_counter(model);
    CHECK(refusal(ErrorKind::limit, with([](GenerateConfig& c) { c.max_tokens = 87; })) == "max_tokens");
    CHECK(refusal(ErrorKind::limit, with([](GenerateConfig& c) { c.loops = 9; })) == "loops");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.max_tokens = 0; })) == "max_tokens");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.temperature = -1; })) == "temperature");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.temperature = 0.0 / 0.0; })) == "temperature");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.top_p = 0; })) == "top_p");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.min_p = 2; })) == "min_p");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.top_k = -1; })) == "top_k");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.repetition_penalty = 0; })) ==
          "repetition_penalty");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.cache_mode = "fp8"; })) == "cache_mode");
    CHECK(refusal(ErrorKind::config, with([](GenerateConfig& c) { c.stop_sequences = {{1}, {}}; })) ==
          "stop_sequences[1]");
    CHECK(refusal(ErrorKind::config, [&] { generate(model, prompt.data(), 0, {}); }) == "prompt");
    const int32_t wild[] = {3, 61};
    CHECK(refusal(ErrorKind::config, [&] { generate(model, wild, 2, {}); }) == "prompt[1]");

    auto batch = [&](auto change) {
        std::vector<GenerateConfig> configs(2);
        for (GenerateConfig& c : configs) c.max_tokens = 4;
        change(configs[1]);
        return [&model, &prompt, configs] { generate_batch(model, {prompt, prompt}, configs); };
    };
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.cache_window = 8; })) == "cache_window");
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.beam_size = 2; })) == "beam_size");
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.loops = 2; })) == "loops");
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.exit_threshold = 0.5; })) == "exit_threshold");
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.temperature = 1; })) == "temperature");
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.top_k = 3; })) == "top_k");
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.top_p = 0.5; })) == "top_p");
    CHECK(refusal(ErrorKind::mode, batch([](GenerateConfig& c) { c.repetition_penalty = 2; })) == "repetition_penalty");
    CHECK(refusal(ErrorKind::config, [&] { generate_batch(model, {}, {GenerateConfig()}); }) == "prompts");
    CHECK(step_counter(model) == before);  // all of it before any work
    free_model(model);
}

void test_stops(const std::string& path) {
    Model* model = load_model(path, 0);
    const std::vector<int32_t> prompt = prompt_of(10, 1);
    const std::vector<int32_t> free = generate(model, prompt.data(), prompt.size(), sampled(4, 20)).tokens;
    GenerateConfig config = sampled(4, 20);
    config.stop_sequences = {{60, 60, 60, 60}, {free[4], free[5]}};
    const Generation stopped = generate(model, prompt.data(), prompt.size(), config);
    CHECK(stopped.stats.stop_reason == "stop_sequence" && stopped.tokens.size() <= 6);
    CHECK(std::equal(stopped.tokens.begin(), stopped.tokens.end(), free.begin()));
    int seen = 0, last_position = 0;
    const Generation cancelled =
        generate_stream(model, prompt.data(), prompt.size(), sampled(4, 20), [&](int32_t token, int position) {
            CHECK(token == free[seen]);
            last_position = position;
            return ++seen < 3;
        });
    CHECK(cancelled.stats.stop_reason == "cancelled" && cancelled.tokens.size() == 3 && last_position == 12);
    CHECK(cancelled.stats.prompt_tokens == 10 && cancelled.stats.loops == 3 &&
          cancelled.stats.cache_bytes == cache_bytes(model, 30, "fp16", 3));
    free_model(model);
}

void test_sampling() {
    // Known answer of Philox4x32-10 for counter 0, key 0 (Random123): 6627e8d5 e169c58d ...
    CHECK(uniform_draw(0, 0) == static_cast<double>(0x6627e8d5e169c58dull >> 11) * 0x1p-53);
    CHECK(uniform_draw(1, 0) != uniform_draw(0, 0) && uniform_draw(0, 1) != uniform_draw(0, 0));
    GenerateConfig config;
    config.temperature = 1;
    const std::vector<float> base = {0.0f, 1.0f, 2.0f, 2.0f, -1.0f};
    auto histogram = [&] {
        std::vector<int> counts(5);
        for (int position = 0; position < 20000; ++position) {
            Sampler sampler(config, 5);
            std::vector<float> l = base;
            ++counts[static_cast<size_t>(sampler.sample({l.data()}, position))];
        }
        return counts;
    };
    std::vector<int> counts = histogram();
    double total = 0;
    for (const float l : base) total += std::exp(double(l));
    for (int id = 0; id < 5; ++id) CHECK(std::fabs(counts[id] / 20000.0 - std::exp(double(base[id])) / total) < 0.015);
    config.top_k = 1;  // ties rank by id
    CHECK(histogram()[2] == 20000);
    config.top_k = 0;
    config.top_p = 0.7;  // 0.37 + 0.37 reach it
    counts = histogram();
    CHECK(counts[2] + counts[3] == 20000 && counts[2] > 9000 && counts[3] > 9000);
    config.top_p = 1;
    config.min_p = 0.3;  // e^-1 = 0.37 stays, e^-2 goes
    counts = histogram();
    CHECK(counts[0] == 0 && counts[4] == 0 && counts[1] > 1000);
    config.min_p = 0;
    config.temperature = 0;
    config.repetition_penalty = 3;
    Sampler sampler(config, 5);
    sampler.saw(2);
    sampler.saw(3);
    std::vector<float> l = base;
    CHECK(sampler.sample({l.data()}, 0) == 1);  // 2/3 < 1
}

}  // namespace

int main() {
    if (!std::freopen("/dev/null", "w", stderr)) return 1;  // refusals write a line each
    const File file;
    test_axes(file.path());
    test_batch(file.path());
    test_rows_at_different_loops(file.path());
    test_contracts(file.path());
    test_stops(file.path());
    test_sampling();
    test_layouts(config_json());
    for (const char* change : {"norm\":\"pre", "norm\":\"post", "norm\":\"pre_post"}) {
        std::string config = config_json();
        config.replace(config.find("norm\":\"sandwich"), 15, change);
        const File other(bytes(config));
        test_axes(other.path());
        test_batch(other.path());
        test_layouts(config);
    }
    return finish();
}
