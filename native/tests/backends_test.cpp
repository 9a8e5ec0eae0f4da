// Choosing a device: a plug-in computes what the built-in backend does, also where it gives only the first tokens in
// rank; one that cannot be used says why, and a device that fails leaves the model usable.
#include "backends.h"

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "check.h"
#include "tiny_model.h"
#include "tinyloop/engine.h"

using namespace tinyloop;
using namespace tiny;

namespace {

LoadOptions on(const std::string& device) {
    LoadOptions options = options_of(1, 16);
    options.device = device;
    return options;
}

// Whether `call` is refused so, in words that name all of `words`.
bool refused(ErrorKind kind, const std::vector<std::string>& words, const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        bool named = error.kind == kind;
        for (const std::string& word : words)
            named = named && std::string(error.what()).find(word) != std::string::npos;
        if (!named) std::printf("refused with: %s\n", error.what());
        return named;
    }
    return false;
}

void test_names() {
    for (const char* name : {"", ":", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "cuda:1x", "cuda:99999", "cuda:0:1",
                             "../cuda", "a/b", "CUDA", "cuda 0"})
        CHECK(refused(ErrorKind::config, {"device", "cuda:N"}, [&] { open_device(name); }));
    CHECK(open_device("cpu").name == "cpu" && open_device("cpu:0").name == "cpu");
    CHECK(open_device("planted").name == "planted:0" && open_device("planted:1").ordinal == 1);
}

void test_reasons() {
    auto unavailable = [](const std::string& name, const std::vector<std::string>& words) {
        return refused(ErrorKind::unavailable, words, [&] { open_device(name); });
    };
    CHECK(unavailable("abacus", {"abacus", "this build has no libtinyloop_abacus.so", "looked in"}));
    CHECK(unavailable("absent", {"no driver (error 35)"}));
    CHECK(unavailable("old", {"libtinyloop_old.so", "version 1", "(16 bytes)"}));
    CHECK(unavailable("empty", {"libtinyloop_empty.so", "has no tinyloop_backend"}));
    CHECK(unavailable("planted:2", {"planted:2", "are 2 devices"}));
    CHECK(unavailable("cpu:1", {"is 1 device"}));

    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("tinyloop_backends_" + std::to_string(::getpid()));
    std::filesystem::create_directory(folder);
    std::ofstream(folder / "libtinyloop_text.so") << "not a library";
    ::setenv("TINYLOOP_BACKEND_PATH", ("::/nowhere:" + folder.string()).c_str(), 1);
    CHECK(unavailable("text", {"libtinyloop_text.so"}));
    CHECK(open_device("planted").ordinal == 0);  // beside the program, though the variable does not name it
    ::unsetenv("TINYLOOP_BACKEND_PATH");
    CHECK(unavailable("text", {"this build has no"}));
    std::filesystem::remove_all(folder);
}

void test_listing() {
    auto find = [](const std::string& name) {
        for (const DeviceFacts& device : devices())
            if (device.name == name) return device;
        return DeviceFacts{"", "", "not listed"};
    };
    CHECK(devices().front().name == "cpu" && find("cpu").reason.empty() && find("cpu").total_bytes == 0);
    CHECK(find("planted:1").reason.empty() && find("planted:1").description == "planted device 1");
    CHECK(find("planted:0").total_bytes == 1 << 30);
    CHECK(find("absent").reason == "no driver (error 35)");
    CHECK(find("old").reason.find("version 1") != std::string::npos);
    CHECK(!find("cuda").reason.empty() || find("cuda:0").reason.empty());
}

// The plug-in's tokens are the built-in backend's, before and after a call that its device failed.
void test_failures(const std::string& path) {
    Model* here = load_model(path, on("cpu"));
    Model* there = load_model(path, on("planted:1"));
    CHECK(device_level(there).starts_with("planted:1/"));
    CHECK(device_free_bytes(there) == 1 << 29 && device_free_bytes(here) == -1);
    const std::vector<int32_t> prompt{1, 2, 3}, breaks{1, 13, 3}, too_large{1, 14, 3};
    GenerateConfig config;
    config.max_tokens = 4;
    const std::vector<int32_t> expected = generate(here, prompt.data(), 3, config).tokens;
    auto same = [&] { return generate(there, prompt.data(), 3, config).tokens == expected; };
    CHECK(same());
    CHECK(refused(ErrorKind::failed, {"a forward pass", "planted at token 13"},
                  [&] { generate(there, breaks.data(), 3, config); }));
    CHECK(same());
    CHECK(refused(ErrorKind::memory, {"planted at token 14"}, [&] { generate(there, too_large.data(), 3, config); }));
    CHECK(same());
    CHECK(refused(ErrorKind::failed, {"planted"}, [&] { create_prefix_cache(there, breaks.data(), 3, 2); }));
    CHECK(same());
    free_model(here);
    free_model(there);

    LoadOptions options = on("planted:1");
    options.threads = 7;
    CHECK(refused(ErrorKind::failed, {"loading the model on planted:1", "planted on device 1"},
                  [&] { load_model(path, options); }));
}

// Every way to generate takes the same tokens from the first in rank as from all logits, and asks for no more than it
// needs.
void test_first_in_rank(const std::string& path) {
    Model* here = load_model(path, on("cpu"));
    Model* there = load_model(path, on("planted"));
    const std::filesystem::path beside = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    void* library = ::dlopen((beside / "libtinyloop_planted.so").c_str(), RTLD_NOW | RTLD_NOLOAD);
    CHECK(library != nullptr);
    if (!library) return;
    const auto whole_rows = reinterpret_cast<uint64_t (*)()>(::dlsym(library, "planted_whole_rows"));
    const std::vector<int32_t> prompt{1, 2, 3}, other{4, 5, 6, 7};

    const auto same = [&](bool needs_all, const std::function<std::vector<Generation>(Model*)>& call) {
        const std::vector<Generation> expected = call(here);
        const uint64_t before = whole_rows();
        const std::vector<Generation> found = call(there);
        CHECK((whole_rows() > before) == needs_all);
        CHECK(found.size() == expected.size());
        for (size_t i = 0; i < expected.size(); ++i) {
            CHECK(found[i].tokens == expected[i].tokens);
            CHECK(found[i].stats.drafted == expected[i].stats.drafted);
            CHECK(found[i].stats.accepted == expected[i].stats.accepted);
        }
    };
    struct Sampling {
        double temperature;
        int top_k;
        double top_p, repetition_penalty;
        bool needs_all;
    };
    for (const Sampling& s : {Sampling{0, 0, 1, 1, false},
                              {0.9, 5, 1, 1, false},
                              {3, 40, 0.9, 1, false},
                              {3, 65, 0.9, 1, true},
                              {1, 0, 1, 1, true},
                              {0, 0, 1, 1.2, true}}) {
        GenerateConfig config;
        config.max_tokens = 12;
        config.temperature = s.temperature;
        config.top_k = s.top_k;
        config.top_p = s.top_p;
        config.repetition_penalty = s.repetition_penalty;
        config.seed = 5;
        same(s.needs_all,
             [&](Model* model) { return std::vector{generate(model, prompt.data(), prompt.size(), config)}; });
        same(s.needs_all, [&](Model* model) { return generate_batch(model, {prompt, other, prompt}, {config}); });
        for (const double margin : {0.0, 0.3}) {
            SpeculativeConfig drafts;
            drafts.draft_loops = 1;
            drafts.draft_ahead = 3;
            drafts.branches = 3;
            drafts.draft_margin = margin;
            same(s.needs_all, [&](Model* model) {
                return std::vector{generate_speculative(model, prompt.data(), prompt.size(), drafts, config),
                                   generate_tree_speculative(model, prompt.data(), prompt.size(), drafts, config)};
            });
        }
    }
    GenerateConfig beams;
    beams.max_tokens = 6;
    beams.beam_size = 3;
    same(true, [&](Model* model) { return std::vector{generate(model, prompt.data(), prompt.size(), beams)}; });
    CHECK(logits(here, prompt.data(), prompt.size(), 2) == logits(there, prompt.data(), prompt.size(), 2));
    ::dlclose(library);
    free_model(here);
    free_model(there);
}

}  // namespace

int main() {
    if (!std::freopen("/dev/null", "w", stderr)) return 1;  // refusals write a line each
    const File file;
    test_names();
    test_reasons();
    test_listing();
    test_first_in_rank(file.path());
    test_failures(file.path());
    return finish();
}
