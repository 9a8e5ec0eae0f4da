// Random tiny models of several families, and a backend that runs rows of them: what backend_test is written with.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "tinyloop/backend.h"

namespace tiny {

// ---------------------------------------------------------------- random tiny models

struct Family {
    const char* name;
    int d_model, n_heads, n_kv_heads, head_dim, d_ffn, vocab;
    int n_prelude, n_core, n_coda;
    int norm, injection, start, rope;
    bool tied, loop_norm, core_norm, biases, qk_norms, gate;
    int dtype;
};

inline constexpr Family kFamilies[] = {
    {"sandwich, concat, coda",
     24,
     4,
     2,
     6,
     40,
     61,
     1,
     2,
     1,
     TL_NORM_SANDWICH,
     TL_INJECT_CONCAT,
     TL_START_PRELUDE,
     TL_ROPE_HALF,
     false,
     true,
     true,
     false,
     false,
     false,
     TL_F32},
    {"pre, add, tied, biases",
     40,
     2,
     2,
     16,
     72,
     45,
     1,
     1,
     0,
     TL_NORM_PRE,
     TL_INJECT_ADD,
     TL_START_ZEROS,
     TL_ROPE_INTERLEAVED,
     true,
     false,
     false,
     true,
     false,
     false,
     TL_F16},
    {"pre, none, qk norms, gate",
     64,
     6,
     2,
     10,
     48,
     33,
     0,
     2,
     0,
     TL_NORM_PRE,
     TL_INJECT_NONE,
     TL_START_PRELUDE,
     TL_ROPE_HALF,
     true,
     true,
     false,
     false,
     true,
     true,
     TL_BF16},
    {"post",         32,           4,     4,     8,     40,   50,    1,     1,     1, TL_NORM_POST, TL_INJECT_CONCAT,
     TL_START_ZEROS, TL_ROPE_HALF, false, false, false, true, false, false, TL_F32},
    {"pre and post, one key head",
     36,
     5,
     1,
     34,
     35,
     40,
     1,
     1,
     1,
     TL_NORM_PRE_POST,
     TL_INJECT_ADD,
     TL_START_PRELUDE,
     TL_ROPE_INTERLEAVED,
     false,
     true,
     true,
     false,
     true,
     false,
     TL_F16},
};

inline uint16_t half_of(float value, int dtype) {  // of values that are far from any edge
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == TL_BF16) return static_cast<uint16_t>(bits >> 16);
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits & 0x7FFFFFFF) - 0x38000000) >> 13));
}

class Tiny {
  public:
    explicit Tiny(const Family& f, unsigned seed = 7) : family(f), random_(seed) {
        const int q = f.n_heads * f.head_dim, kv = f.n_kv_heads * f.head_dim, d = f.d_model;
        const bool pre = f.norm != TL_NORM_POST, post = f.norm != TL_NORM_PRE;
        const int count = f.n_prelude + f.n_core + f.n_coda;
        for (int i = 0; i < count; ++i) {
            tl_layer layer{};
            if (pre) layer.attn_norm = vector(d), layer.ffn_norm = vector(d);
            if (post) layer.attn_post_norm = vector(d), layer.ffn_post_norm = vector(d);
            layer.wq = matrix(q, d), layer.wk = matrix(kv, d), layer.wv = matrix(kv, d), layer.wo = matrix(d, q);
            if (f.biases) layer.q_bias = vector(q), layer.k_bias = vector(kv), layer.v_bias = vector(kv);
            if (f.qk_norms) layer.q_norm = vector(f.head_dim), layer.k_norm = vector(f.head_dim);
            layer.w_gate = matrix(f.d_ffn, d), layer.w_up = matrix(f.d_ffn, d), layer.w_down = matrix(d, f.d_ffn);
            layers_.push_back(layer);
        }
        desc = {f.vocab,
                d,
                f.n_heads,
                f.n_kv_heads,
                f.head_dim,
                f.d_ffn,
                f.n_prelude,
                f.n_core,
                f.n_coda,
                f.norm,
                f.injection,
                f.start,
                f.rope,
                1e-5f,
                10000.0f,
                1.5f,
                0.7f,
                layers_.data(),
                matrix(f.vocab, d, 1.0f),
                {},
                {},
                {},
                {},
                vector(d),
                {},
                {}};
        if (!f.tied) desc.head = matrix(f.vocab, d);
        if (f.injection == TL_INJECT_CONCAT) desc.inject = matrix(d, 2 * d);
        if (f.loop_norm) desc.loop_norm = vector(d);
        if (f.core_norm) desc.core_norm = vector(d);
        if (f.gate) {
            desc.exit_gate = matrix(1, d);
            desc.exit_gate_bias = vector(1);
        }
    }

    const Family family;
    tl_model_desc desc{};

  private:
    tl_tensor tensor(int rows, int cols, float middle, float spread) {
        const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
        auto bytes = std::make_unique<char[]>(count * 4);
        for (size_t i = 0; i < count; ++i) {
            const float value = middle + spread * (static_cast<float>(random_()) / 4294967296.0f - 0.5f);
            if (family.dtype == TL_F32) {
                std::memcpy(&bytes[4 * i], &value, 4);
            } else {
                const uint16_t half = half_of(std::fabs(value) < 0.001f ? 0.001f : value, family.dtype);
                std::memcpy(&bytes[2 * i], &half, 2);
            }
        }
        const tl_tensor out{bytes.get(), family.dtype, rows, cols, TL_ROWS};
        data_.push_back(std::move(bytes));
        return out;
    }
    tl_tensor vector(int rows) { return tensor(rows, 1, 1.0f, 0.4f); }
    tl_tensor matrix(int rows, int cols, float spread = 0.6f) { return tensor(rows, cols, 0.0f, spread); }

    std::mt19937 random_;
    std::vector<std::unique_ptr<char[]>> data_;
    std::vector<tl_layer> layers_;
};

// ---------------------------------------------------------------- a backend in use

class Model {
  public:
    Model(const tl_backend& backend, const tl_model_desc& desc, int max_rows, int weights = TL_AS_STORED)
        : backend_(backend), vocab(desc.vocab_size), max_rows(max_rows) {
        tl_options options{};
        options.threads = 1;
        options.max_rows = max_rows;
        options.simd = "auto";
        options.weights = weights;
        tl_status status{};
        const int result = backend.model_create(&desc, &options, &model_, &status);
        if (result != TL_OK) std::printf("%s\n", status.message);
        CHECK(result == TL_OK);
    }
    ~Model() {
        for (tl_cache* cache : caches) backend_.cache_destroy(cache);
        if (states) backend_.states_destroy(states);
        backend_.model_destroy(model_);
    }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    tl_cache* add_cache(int mode, int positions, int loops, int window = 0) {
        const tl_cache_desc shape{mode, positions, loops, window};
        tl_status status{};
        tl_cache* cache = nullptr;
        CHECK(backend_.cache_create(model_, &shape, &cache, &status) == TL_OK);
        caches.push_back(cache);
        return cache;
    }
    void add_states(int count) {
        tl_status status{};
        CHECK(backend_.states_create(model_, count, &states, &status) == TL_OK);
    }
    // Logits of the rows that want them; rows go in chunks.
    std::vector<float> run(const std::vector<tl_row>& rows, size_t chunk = 0) {
        std::vector<float> out;
        loops_run.assign(rows.size(), -1);
        if (!chunk) chunk = static_cast<size_t>(max_rows);
        for (size_t begin = 0; begin < rows.size(); begin += chunk) {
            const size_t count = std::min(chunk, rows.size() - begin);
            std::vector<float> some(count * static_cast<size_t>(vocab), NAN);
            tl_status status{};
            const int result =
                backend_.forward(model_, caches.data(), static_cast<int>(caches.size()), states, rows.data() + begin,
                                 static_cast<int>(count), some.data(), nullptr, loops_run.data() + begin, &status);
            if (result != TL_OK) std::printf("%s\n", status.message);
            CHECK(result == TL_OK);
            size_t wanted = 0;
            for (size_t i = begin; i < begin + count; ++i) wanted += (rows[i].flags & TL_ROW_LOGITS) != 0;
            out.insert(out.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(wanted * vocab));
        }
        return out;
    }
    // What rows of one call get that want the first in rank, some of them, or all logits.
    struct Wanted {
        std::vector<float> logits;
        std::vector<tl_rank> best;
    };
    Wanted first_of(const std::vector<tl_row>& rows) {
        Wanted out;
        for (const tl_row& r : rows) {
            out.logits.resize(out.logits.size() + static_cast<size_t>(r.best ? 0 : vocab), NAN);
            out.best.resize(out.best.size() + static_cast<size_t>(r.best));
        }
        tl_status status{};
        CHECK(backend_.forward(model_, caches.data(), static_cast<int>(caches.size()), states, rows.data(),
                               static_cast<int>(rows.size()), out.logits.data(), out.best.data(), nullptr,
                               &status) == TL_OK);
        return out;
    }
    tl_model* get() const { return model_; }

  private:
    const tl_backend& backend_;
    tl_model* model_ = nullptr;

  public:
    const int vocab, max_rows;
    std::vector<tl_cache*> caches;
    tl_states* states = nullptr;
    std::vector<int32_t> loops_run;
};

inline tl_row row(int cache, int position, int loops, uint32_t flags, int state = -1) {
    return {cache, position, position, position, 1, (position * 7 + 1) % 33, 0, loops, state, flags, 0, 0};
}

inline std::vector<tl_row> sequence(int cache, int begin, int end, int loops, uint32_t flags = TL_ROW_LOGITS) {
    std::vector<tl_row> rows;
    for (int p = begin; p < end; ++p) rows.push_back(row(cache, p, loops, flags));
    return rows;
}

inline double difference(const std::vector<float>& one, const std::vector<float>& other) {
    if (one.size() != other.size()) return INFINITY;
    double most = 0, scale = 1;
    for (size_t i = 0; i < one.size(); ++i) {
        const double apart = std::fabs(double(one[i]) - other[i]);
        most = apart <= most ? most : apart;  // NaN counts
        scale = std::max(scale, std::fabs(double(other[i])));
    }
    return most / scale;
}

inline bool same_bits(const std::vector<float>& one, const std::vector<float>& other) {
    return one.size() == other.size() && (one.empty() || std::memcmp(one.data(), other.data(), one.size() * 4) == 0);
}

}  // namespace tiny
