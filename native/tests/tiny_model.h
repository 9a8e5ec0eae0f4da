// Small random models for the tests, written here byte by byte, independently of the reader under test.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cmath>
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

enum class Layout { rows, panels, int8, int4 };  // int4: embedding and head are int8

struct Stored {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string data;
};

template <class T>
std::string raw(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// The fp16 of a number that is one, or nearly: for scales, of normal size.
inline uint16_t half_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t rounded = bits + 0xFFF + (bits >> 13 & 1);
    return static_cast<uint16_t>((rounded >> 16 & 0x8000) | (((rounded & 0x7FFFFFFF) >> 13) - (112 << 10)));
}

inline float float_of(uint16_t half) {
    const uint32_t bits = (half & 0x8000u) << 16 | ((half & 0x7FFFu) + (112u << 10)) << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// A matrix as floats in panels, or quantised: int8 by its outputs' largest magnitudes, int4 by those of 32 inputs.
inline Stored in_panels(const std::vector<float>& values, const tinyloop::ExpectedTensor& tensor, Layout layout) {
    auto place = [](size_t i, int head) {
        const size_t h = static_cast<size_t>(head);
        return head ? i / h * ((h + 15) / 16 * 16) + i % h : i;
    };
    const size_t columns = static_cast<size_t>(tensor.shape[1]), panels = static_cast<size_t>(tensor.panels[0]);
    const size_t inputs = layout == Layout::panels ? static_cast<size_t>(tensor.panels[1])
                                                   : (static_cast<size_t>(tensor.panels[1]) + 31) / 32 * 32;
    std::vector<float> whole(panels * inputs * 16);  // [panel][input][output]
    std::vector<bool> used(panels * 16);
    for (size_t i = 0; i < values.size(); ++i) {
        const size_t output = place(i / columns, tensor.output_heads), input = place(i % columns, tensor.input_heads);
        whole[(output / 16 * inputs + input) * 16 + output % 16] = values[i];
        used[output] = true;
    }
    if (layout == Layout::panels) return {"F32", tensor.panels, raw(whole)};
    const size_t group = layout == Layout::int8 ? inputs : 32;
    const size_t panel_bytes = layout == Layout::int8 ? inputs * 16 + 64 : inputs / 32 * 288;
    std::string data(panels * panel_bytes, '\0');
    for (size_t output = 0; output < panels * 16; ++output) {
        if (!used[output]) continue;
        char* panel = data.data() + output / 16 * panel_bytes;
        const size_t j = output % 16;
        for (size_t begin = 0; begin < inputs; begin += group) {
            auto weight = [&](size_t k) { return whole[(output / 16 * inputs + begin + k) * 16 + j]; };
            float top = 0;
            for (size_t k = 0; k < group; ++k)
                if (std::fabs(weight(k)) > std::fabs(top)) top = weight(k);
            if (layout == Layout::int8) {
                const float scale = std::fabs(top) / 127.0f;
                std::memcpy(panel + inputs * 16 + j * 4, &scale, 4);
                for (size_t k = 0; k < group; ++k)
                    panel[(k / 4 * 16 + j) * 4 + k % 4] = static_cast<char>(std::lrint(weight(k) / scale));
                continue;
            }
            const uint16_t half = half_of(top / -8.0f);
            char* bytes = panel + begin / 32 * 288;
            std::memcpy(bytes + 256 + j * 2, &half, 2);
            for (size_t k = 0; k < group; ++k) {
                const long q = std::min(7l, std::lrint(weight(k) / float_of(half)));
                char& byte = bytes[(k / 8 * 16 + j) * 4 + k % 4];
                byte = static_cast<char>(byte | (q + 8) << (k / 4 % 2 * 4));
            }
        }
    }
    if (layout == Layout::int8) return {"I8", {tensor.panels[0], static_cast<int64_t>(inputs / 4 + 1), 16, 4}, data};
    return {"U8", {tensor.panels[0], static_cast<int64_t>(inputs / 32), 288}, data};
}

// The whole file as bytes: F32 weights around zero, norms around one, the same numbers in all layouts. In panels int4
// and then vectors come last, so that every matrix is aligned.
inline std::string bytes(const std::string& config = config_json(), Layout layout = Layout::rows, unsigned seed = 1) {
    std::mt19937 random(seed);
    std::vector<std::pair<std::string, Stored>> matrices, vectors;
    for (const tinyloop::ExpectedTensor& tensor : tinyloop::expected_tensors(tinyloop::parse_config(config))) {
        size_t count = 1;
        for (int64_t size : tensor.shape) count *= static_cast<size_t>(size);
        std::vector<float> values;
        for (size_t i = 0; i < count; ++i) {
            const float uniform = static_cast<float>(random()) / 4294967296.0f - 0.5f;
            values.push_back(tensor.shape.size() == 1 ? 1.0f + 0.2f * uniform : 0.6f * uniform);
        }
        if (layout == Layout::rows)
            matrices.emplace_back(tensor.name, Stored{"F32", tensor.shape, raw(values)});
        else if (tensor.panels.empty())
            vectors.emplace_back(tensor.name, Stored{"F32", tensor.shape, raw(values)});
        else if (layout == Layout::int4 && (tensor.name == "embed.weight" || tensor.name == "head.weight"))
            matrices.emplace(matrices.begin(), tensor.name, in_panels(values, tensor, Layout::int8));
        else
            matrices.emplace_back(tensor.name, in_panels(values, tensor, layout));
    }
    std::string data,
        header = "{\"__metadata__\":{\"format\":\"tinyloop\",\"format_version\":\"1\",\"config\":" + quoted(config);
    if (layout != Layout::rows) header += ",\"data_sha256\":\"" + std::string(64, 'a') + "\"";
    header += '}';
    matrices.insert(matrices.end(), vectors.begin(), vectors.end());
    for (const auto& [name, stored] : matrices) {
        std::string dims;
        for (int64_t size : stored.shape) {
            if (!dims.empty()) dims += ',';
            dims += std::to_string(size);
        }
        header += ",\"" + name + "\":{\"dtype\":\"" + stored.dtype + "\",\"shape\":[" + dims + "],\"data_offsets\":[" +
                  std::to_string(data.size()) + "," + std::to_string(data.size() + stored.data.size()) + "]}";
        data += stored.data;
    }
    header += '}';
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
