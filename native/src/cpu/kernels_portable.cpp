// The kernels without any SIMD instruction: the readable specification of the others, and the fallback.
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "kernels.h"
#include "tinyloop/backend.h"

namespace tinyloop::cpu {
namespace {

constexpr int kTileRows = 4, kAccumulators = 4;

struct V {
    float lane[kPanel];

    static V zero() { return set1(0); }
    static V set1(float x) {
        V v;
        for (float& lane : v.lane) lane = x;
        return v;
    }
    static V load(const float* from) {
        V v;
        std::memcpy(v.lane, from, sizeof v.lane);
        return v;
    }
    void store(float* to) const { std::memcpy(to, lane, sizeof lane); }

    template <int kDtype>
    static V load_as(const char* from) {
        if constexpr (kDtype == TL_F32) return load(reinterpret_cast<const float*>(from));
        uint16_t raw[kPanel];
        std::memcpy(raw, from, sizeof raw);
        V v;
        for (int j = 0; j < kPanel; ++j) v.lane[j] = kDtype == TL_F16 ? half_to_float(raw[j]) : bfloat_to_float(raw[j]);
        return v;
    }
    template <int>
    V to_order() const {
        return *this;
    }
    void store_half(uint16_t* to) const {
        for (int j = 0; j < kPanel; ++j) to[j] = float_to_half(lane[j]);
    }
    // The low bits of each element's representation.
    void store_low16(int16_t* to) const {
        for (int j = 0; j < kPanel; ++j) to[j] = static_cast<int16_t>(bits(j));
    }
    void store_low8(int8_t* to) const {
        for (int j = 0; j < kPanel; ++j) to[j] = static_cast<int8_t>(bits(j));
    }
    uint32_t bits(int j) const {
        uint32_t raw;
        std::memcpy(&raw, &lane[j], sizeof raw);
        return raw;
    }
};

template <class F>
V each(F f) {
    V v;
    for (int j = 0; j < kPanel; ++j) v.lane[j] = f(j);
    return v;
}
V operator+(V a, V b) {
    return each([&](int j) { return a.lane[j] + b.lane[j]; });
}
V operator-(V a, V b) {
    return each([&](int j) { return a.lane[j] - b.lane[j]; });
}
V operator*(V a, V b) {
    return each([&](int j) { return a.lane[j] * b.lane[j]; });
}
V operator/(V a, V b) {
    return each([&](int j) { return a.lane[j] / b.lane[j]; });
}
V fma(V a, V b, V c) {
    return each([&](int j) { return std::fma(a.lane[j], b.lane[j], c.lane[j]); });
}
V max(V a, V b) {
    return each([&](int j) { return a.lane[j] > b.lane[j] ? a.lane[j] : b.lane[j]; });
}
V select_ge(V x, V bound) {
    return each([&](int j) { return x.lane[j] >= bound.lane[j] ? x.lane[j] : 0.0f; });
}
V select_negative(V key, V negative, V other) {
    return each([&](int j) { return key.lane[j] < 0 ? negative.lane[j] : other.lane[j]; });
}
// p * 2^n, where t = 1.5 * 2^23 + n
V pow2_scale(V p, V t) {
    return each([&](int j) {
        uint32_t bits, shift;
        std::memcpy(&bits, &p.lane[j], 4);
        std::memcpy(&shift, &t.lane[j], 4);
        bits += shift << 23;
        float scaled;
        std::memcpy(&scaled, &bits, 4);
        return scaled;
    });
}

constexpr int kIntegerRows = 4;

struct Bytes {
    uint8_t byte[kPanel][4];

    static Bytes load(const char* from) {
        Bytes b;
        std::memcpy(b.byte, from, sizeof b.byte);
        return b;
    }
    static Bytes low(const char* from) { return shifted(from, 0); }
    static Bytes high(const char* from) { return shifted(from, 4); }
    static Bytes shifted(const char* from, int bits) {
        Bytes b = load(from);
        for (auto& output : b.byte)
            for (uint8_t& byte : output) byte = byte >> bits & 15;
        return b;
    }
};

struct Quad {
    int8_t q[4];
    static Quad load(const int8_t* from) { return {from[0], from[1], from[2], from[3]}; }
};

struct Sums {
    int32_t lane[kPanel];

    static Sums start(const int16_t*) { return {}; }
    void add(const Bytes& w, Quad q) {
        for (int j = 0; j < kPanel; ++j)
            for (int t = 0; t < 4; ++t) lane[j] += static_cast<int8_t>(w.byte[j][t]) * q.q[t];
    }
    V to_float() const {
        return each([&](int j) { return static_cast<float>(lane[j]); });
    }
};

struct ShortSums {
    int16_t lane[kPanel][2];

    static ShortSums start(const int16_t* offsets) {
        ShortSums s;
        for (auto& output : s.lane) std::memcpy(output, offsets, sizeof output);
        return s;
    }
    void add(const Bytes& w, Quad q) {
        for (int j = 0; j < kPanel; ++j)
            for (int t = 0; t < 4; ++t) lane[j][t / 2] = static_cast<int16_t>(lane[j][t / 2] + w.byte[j][t] * q.q[t]);
    }
    V to_float() const {
        return each([&](int j) { return static_cast<float>(lane[j][0] + lane[j][1]); });
    }
};

float largest_magnitude(V a, V b) {
    uint32_t best = 0;
    for (const V* v : {&a, &b})
        for (const float& x : v->lane) {
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            bits &= 0x7FFFFFFF;
            best = bits > best ? bits : best;
        }
    float value;
    std::memcpy(&value, &best, 4);
    return value;
}

void store_int8(V x, int8_t* to) {
    for (int j = 0; j < kPanel; ++j) to[j] = static_cast<int8_t>(std::nearbyint(x.lane[j]));
}

void group_offsets(const int8_t* q, int16_t* offsets) {
    int sum[2] = {};
    for (int k = 0; k < kGroup; ++k) sum[k % 4 / 2] += q[k];
    for (int i = 0; i < 2; ++i) offsets[i] = static_cast<int16_t>(-8 * sum[i]);
}

template <class F>
float tree(V v, F combine) {
    for (int width = kPanel / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) v.lane[j] = combine(v.lane[j], v.lane[j + width]);
    return v.lane[0];
}
float sum_of_lanes(V v) {
    return tree(v, [](float a, float b) { return a + b; });
}
float highest_lane(V v) {
    return tree(v, [](float a, float b) { return a > b ? a : b; });
}

struct Pairs {
    int16_t lane[2 * kPanel];

    static Pairs load(const char* from) {
        Pairs p;
        std::memcpy(p.lane, from, sizeof p.lane);
        return p;
    }
    static Pairs widen(const char* from) {
        Pairs p;
        for (int j = 0; j < 2 * kPanel; ++j) p.lane[j] = static_cast<signed char>(from[j]);
        return p;
    }
    static Pairs set1(const int16_t* pair) {
        Pairs p;
        for (int j = 0; j < 2 * kPanel; ++j) p.lane[j] = pair[j % 2];
        return p;
    }
    void store(char* to) const { std::memcpy(to, lane, sizeof lane); }
};

struct PairSums {
    int32_t lane[kPanel];

    static PairSums zero() { return {}; }
    V to_floats() const {
        return each([&](int j) { return static_cast<float>(lane[j]); });
    }
};
PairSums add_products(PairSums sum, const Pairs& a, const Pairs& b) {
    for (int j = 0; j < kPanel; ++j)
        sum.lane[j] += a.lane[2 * j] * b.lane[2 * j] + a.lane[2 * j + 1] * b.lane[2 * j + 1];
    return sum;
}

#include "kernels_impl.h"

#include "attention_impl.h"

constexpr Kernels kTable = {"portable", product,       rmsnorm, add,  swiglu,           dot,       scale,   store_fp16,
                            store_int8, round_queries, attend,  fold, finish_attention, to_floats, quantize};

}  // namespace

const Kernels* portable_kernels() { return &kTable; }

}  // namespace tinyloop::cpu
