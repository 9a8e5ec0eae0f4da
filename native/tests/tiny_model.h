// Small random models for the tests, written here byte by byte, independently of the reader under test.
#pragma once
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "artifact.h"
#include "check.h"
#include "tinyloop/engine.h"

namespace tiny {

inline std::string config_json(const std::string& changes = "") {
    return R"({"vocab_size":61,"d_model":24,"n_heads":4,"n_kv_heads":2,"head_dim":6,"d_ffn":40,"n_prelude":1,"n_core":2,"n_coda":1,)"
           R"("loops":3,"max_loops":8,"max_seq_len":96,"norm":"sandwich","norm_eps":1e-5,"injection":"concat","start":"prelude",)"
           R"("loop_norm":true,"core_norm":true,"rope":"half","rope_theta":10000.0,"tied_head":false,"bos_id":null,"eos_ids":[],"beta":null)" +
           changes + "}";
}

inline std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) out += (c == '"' || c == '\\') ? std::string("\\") + c : std::string(1, c);
    return out + "\"";
}

enum class Layout { rows, panels };

// A tensor's bytes: in rows, or as panels of 16 outputs with every head padded to a multiple of 16.
inline std::string laid_out(const std::vector<float>& values, const tinyloop::ExpectedTensor& tensor, Layout layout) {
    if (layout == Layout::rows || tensor.panels.empty())
        return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
    auto place = [](size_t i, int head) {
        const size_t h = static_cast<size_t>(head);
        return head ? i / h * ((h + 15) / 16 * 16) + i % h : i;
    };
    const size_t columns = static_cast<size_t>(tensor.shape[1]), inputs = static_cast<size_t>(tensor.panels[1]);
    std::vector<float> out(static_cast<size_t>(tensor.panels[0]) * inputs * 16);
    for (size_t i = 0; i < values.size(); ++i) {
        const size_t output = place(i / columns, tensor.output_heads), input = place(i % columns, tensor.input_heads);
        out[(output / 16 * inputs + input) * 16 + output % 16] = values[i];
    }
    return {reinterpret_cast<const char*>(out.data()), out.size() * sizeof(float)};
}

// The whole file as bytes: F32 weights around zero, norms around one, the same numbers in both layouts. In panels the
// vectors come last, so that every matrix is aligned.
inline std::string bytes(const std::string& config = config_json(), Layout layout = Layout::rows, unsigned seed = 1) {
    std::mt19937 random(seed);
    std::string entries, data;
    auto append = [&](const tinyloop::ExpectedTensor& tensor, const std::string& content) {
        const bool panels = layout == Layout::panels && !tensor.panels.empty();
        std::string dims;
        for (int64_t size : panels ? tensor.panels : tensor.shape)
            dims += (dims.empty() ? "" : ",") + std::to_string(size);
        entries += ",\"" + tensor.name + "\":{\"dtype\":\"F32\",\"shape\":[" + dims + "],\"data_offsets\":[" +
                   std::to_string(data.size()) + "," + std::to_string(data.size() + content.size()) + "]}";
        data += content;
    };
    std::vector<std::pair<tinyloop::ExpectedTensor, std::string>> last;
    for (const tinyloop::ExpectedTensor& tensor : tinyloop::expected_tensors(tinyloop::parse_config(config))) {
        size_t count = 1;
        for (int64_t size : tensor.shape) count *= static_cast<size_t>(size);
        std::vector<float> values;
        for (size_t i = 0; i < count; ++i) {
            const float uniform = static_cast<float>(random()) / 4294967296.0f - 0.5f;
            values.push_back(tensor.shape.size() == 1 ? 1.0f + 0.2f * uniform : 0.6f * uniform);
        }
        if (layout == Layout::panels && tensor.panels.empty())
            last.emplace_back(tensor, laid_out(values, tensor, layout));
        else
            append(tensor, laid_out(values, tensor, layout));
    }
    for (const auto& [tensor, content] : last) append(tensor, content);
    std::string header =
        "{\"__metadata__\":{\"format\":\"tinyloop\",\"format_version\":\"1\",\"config\":" + quoted(config) +
        (layout == Layout::panels ? ",\"data_sha256\":\"" + std::string(64, 'a') + "\"" : "") + "}" + entries + "}";
    while ((header.size() + 8) % 64) header += ' ';
    std::string out;
    for (int i = 0; i < 8; ++i) out += static_cast<char>(header.size() >> (8 * i));
    return out + header + data;
}

class File {
  public:
    explicit File(const std::string& content = bytes()) {
        const char* base = std::getenv("TMPDIR");
        path_ = std::string(base ? base : P_tmpdir) + "/tinyloop-test-XXXXXX";
        const int fd = ::mkstemp(path_.data());
        ::close(fd);
        write(content);
    }
    ~File() { ::unlink(path_.c_str()); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    void write(const std::string& content) const {
        std::ofstream(path_, std::ios::binary | std::ios::trunc)
            .write(content.data(), static_cast<std::streamsize>(content.size()));
    }
    const std::string& path() const { return path_; }

  private:
    std::string path_;
};

// Requests that exercise every sampling field.
inline std::vector<int32_t> prompt_of(int length, int salt) {
    std::vector<int32_t> out;
    for (int i = 0; i < length; ++i) out.push_back((i * i * 7 + i * salt + salt) % 61);
    return out;
}

inline tinyloop::LoadOptions options_of(int threads, int chunk, const std::string& simd = "auto") {
    tinyloop::LoadOptions options;
    options.threads = threads;
    options.prefill_chunk = chunk;
    options.simd = simd;
    return options;
}

inline tinyloop::GenerateConfig sampled(uint64_t seed, int max_tokens) {
    tinyloop::GenerateConfig config;
    config.temperature = 1.3;
    config.top_k = 40;
    config.top_p = 0.95;
    config.repetition_penalty = 1.1;
    config.seed = seed;
    config.max_tokens = max_tokens;
    return config;
}

// The field of the refusal that the call ends in, whose kind is checked.
template <class F>
std::string refusal(tinyloop::ErrorKind kind, F call) {
    try {
        call();
    } catch (const tinyloop::Error& error) {
        CHECK(error.kind == kind);
        return error.field;
    }
    return "nothing was refused";
}

}  // namespace tiny
