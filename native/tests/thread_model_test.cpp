// A model used from several threads: overlapping calls are refused and disturb nothing; the team's size never shows.
// Runs under TSan too.
#include <atomic>
#include <thread>
#include <utility>

#include "check.h"
#include "tiny_model.h"
#include "tinyloop/engine.h"

using namespace tinyloop;
using namespace tiny;

namespace {

void test_overlap_is_refused(const std::string& path) {
    Model* model = load_model(path, options_of(2, 16));
    const std::vector<int32_t> prompt = prompt_of(5, 1);
    const std::vector<int32_t> expected = generate(model, prompt.data(), prompt.size(), sampled(1, 30)).tokens;
    std::atomic<int> stage{0};
    std::vector<int32_t> undisturbed;
    std::thread other([&] {
        undisturbed = generate_stream(model, prompt.data(), prompt.size(), sampled(1, 30), [&](int32_t, int) {
                          stage.store(1);
                          while (stage.load() == 1) std::this_thread::yield();
                          return true;
                      }).tokens;
    });
    while (stage.load() != 1) std::this_thread::yield();
    CHECK(refusal(ErrorKind::busy, [&] { generate(model, prompt.data(), prompt.size(), sampled(1, 3)); }) == "model");
    CHECK(step_counter(model) > 0);
    std::atomic<bool> done{false};
    std::thread releaser([&] {
        while (!done.load()) {
            stage.store(2);
            std::this_thread::yield();
        }
    });
    other.join();
    done = true;
    releaser.join();
    CHECK(undisturbed == expected);
    free_model(model);
}

void test_team_sizes(const std::string& path) {
    const std::vector<std::vector<int32_t>> prompts = {prompt_of(9, 1), prompt_of(30, 2), prompt_of(2, 3)};
    std::vector<std::vector<int32_t>> first;
    for (const int threads : {1, 2, 3, 4}) {
        Model* model = load_model(path, options_of(threads, 8));
        std::vector<std::vector<int32_t>> found;
        for (const Generation& lane : generate_batch(model, prompts, {sampled(5, 12)})) found.push_back(lane.tokens);
        if (first.empty()) first = found;
        CHECK(found == first);
        free_model(model);
    }
}

// Prompts long enough that threads share out rows: alone, in parts, and beside a call with few rows.
void test_many_rows(const std::string& path) {
    const std::vector<int32_t> prompt = prompt_of(90, 4);
    std::vector<int32_t> first;
    for (const auto& [threads, chunk] : {std::pair{1, 7}, {1, 96}, {2, 96}, {3, 96}, {4, 96}}) {
        Model* model = load_model(path, options_of(threads, chunk));
        const std::vector<int32_t> found = generate(model, prompt.data(), prompt.size(), sampled(7, 4)).tokens;
        if (first.empty()) first = found;
        CHECK(found == first);
        free_model(model);
    }
}

}  // namespace

int main() {
    if (!std::freopen("/dev/null", "w", stderr)) return 1;  // refusals write a line each
    const File file;
    test_overlap_is_refused(file.path());
    test_team_sizes(file.path());
    test_many_rows(file.path());
    return finish();
}
