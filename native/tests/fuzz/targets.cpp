#include "fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tiny_model.h"
#include "tinyloop/engine.h"

using namespace tinyloop;

namespace fuzz {
namespace {

LoadOptions small() { return tiny::options_of(1, 8); }

// Takes numbers from the input until it is empty, then zeros.
class Source {
  public:
    Source(const uint8_t* data, size_t size) : data_(data), size_(size) {}
    bool empty() const { return size_ == 0; }
    int byte() {
        if (empty()) return 0;
        --size_;
        return *data_++;
    }
    int below(int limit) { return byte() % limit; }

  private:
    const uint8_t* data_;
    size_t size_;
};

std::vector<int32_t> prompt_from(Source& in) {
    std::vector<int32_t> prompt = tiny::prompt_of(in.below(24), in.below(3));
    if (in.below(32) == 0) prompt.push_back(in.byte() - 100);  // now and then not a token
    return prompt;
}

GenerateConfig config_from(Source& in) {
    static constexpr const char* kModes[] = {"fp16", "int8", "h_fp16", "h_int8", "int4", "fp8"};
    GenerateConfig config;
    const int flags = in.byte();
    config.loops = in.below(10);
    config.max_tokens = in.below(8);
    config.cache_mode = kModes[in.below(6)];
    config.seed = static_cast<uint64_t>(in.byte());
    if (flags & 1) config.temperature = in.below(40) / 10.0 - 0.2;
    if (flags & 2) config.top_k = in.below(70) - 2;
    if (flags & 4) config.top_p = in.below(12) / 10.0;
    if (flags & 8) config.min_p = in.below(12) / 10.0;
    if (flags & 16) config.repetition_penalty = in.below(30) / 10.0;
    if (flags & 32) config.stop_sequences = {{in.below(62)}, prompt_from(in)};
    if (flags & 64) config.cache_window = in.below(20) - 1;
    if (flags & 128) config.exit_threshold = in.below(12) / 10.0;
    if ((flags & 3) == 3) config.beam_size = in.below(5);
    config.ignore_eos = flags & 4;
    return config;
}

template <class F>
void refused_or(F call) {
    try {
        call();
    } catch (const Error& error) {
        if (error.field.empty() && error.kind != ErrorKind::memory) std::abort();
    }
}

class Calls {
  public:
    void run(Source& in) {
        while (!in.empty()) refused_or([&] { step(in); });
    }

  private:
    void check(const Generation& found, const std::vector<int32_t>& prompt, GenerateConfig config) {
        if (config.beam_size > 1) return;
        if (found.tokens != generate(cold(), prompt.data(), prompt.size(), config).tokens) std::abort();
    }

    void step(Source& in) {
        const int what = in.below(9);
        const std::vector<int32_t> prompt = prompt_from(in);
        GenerateConfig config = config_from(in);
        const int32_t* p = prompt.data();
        const size_t n = prompt.size();
        switch (what) {
            case 0:
                check(generate(warm(), p, n, config), prompt, config);
                break;
            case 1: {
                int left = in.below(4);
                generate_stream(warm(), p, n, config, [&](int32_t, int) { return left-- > 0; });
                break;
            }
            case 2: {
                const std::vector<int32_t> other = prompt_from(in);
                const std::vector<Generation> lanes = generate_batch(warm(), {other, prompt}, {config});
                check(lanes[1], prompt, config);
                break;
            }
            case 3: {
                SpeculativeConfig s;
                s.draft_loops = in.below(6);
                s.draft_ahead = in.below(10);
                s.branches = in.below(5);
                const bool tree = in.below(2);
                check((tree ? generate_tree_speculative : generate_speculative)(warm(), p, n, s, config, {}), prompt,
                      config);
                break;
            }
            case 4:
                prefix_.reset(create_prefix_cache(warm(), p, n, config.loops, config.cache_mode));
                break;
            case 5: {
                if (!prefix_) return;
                std::vector<int32_t> whole = prefix_tokens(prefix_.get());
                whole.insert(whole.end(), prompt.begin(), prompt.end());
                check(generate_from_prefix_cache(warm(), prefix_.get(), p, n, config), whole, config);
                break;
            }
            case 6:
                register_prefix(pool_.get(), warm(), p, n, config.loops, config.cache_mode);
                break;
            case 7:
                check(generate_with_pool(warm(), pool_.get(), p, n, config), prompt, config);
                break;
            default: {
                const std::unique_ptr<ResumeHandle, void (*)(ResumeHandle*)> handle(
                    create_resume_handle(warm(), p, n, config.loops, config.cache_mode, config.cache_window),
                    free_resume_handle);
                config.loops = loops_used(handle.get()) + in.below(3);
                check(resume_generate(warm(), handle.get(), config.loops, config), prompt, config);
            }
        }
    }

    static Model* model(int chunk) {
        static const tiny::File file;
        return load_model(file.path(), tiny::options_of(1, chunk));
    }
    static Model* warm() {
        static const std::unique_ptr<Model, void (*)(Model*)> held(model(8), free_model);
        return held.get();
    }
    static Model* cold() {
        static const std::unique_ptr<Model, void (*)(Model*)> held(model(64), free_model);
        return held.get();
    }

    std::unique_ptr<PrefixCache, void (*)(PrefixCache*)> prefix_{nullptr, free_prefix_cache};
    std::unique_ptr<PrefixPool, void (*)(PrefixPool*)> pool_{create_prefix_pool(2), free_prefix_pool};
};

}  // namespace

void artifact(const uint8_t* data, size_t size) {
    const int fd = ::memfd_create("model", 0);
    if (fd < 0 || ::write(fd, data, size) != static_cast<ssize_t>(size)) std::abort();
    refused_or([&] {
        const std::string path = "/proc/self/fd/" + std::to_string(fd);
        const std::unique_ptr<Model, void (*)(Model*)> model(load_model(path, small()), free_model);
        const int32_t prompt[] = {0};
        GenerateConfig config;
        config.max_tokens = 1;
        config.loops = 1;
        generate(model.get(), prompt, 1, config);
    });
    ::close(fd);
}

void calls(const uint8_t* data, size_t size) {
    Source in(data, size);
    Calls().run(in);
}

}  // namespace fuzz
