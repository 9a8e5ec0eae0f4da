// The kernels without any SIMD instruction: the readable specification of the others, and the fallback.
#include <cmath>
#include <cstring>

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
        if constexpr (kDtype == kInt8) {
            V v;
            for (int j = 0; j < kPanel; ++j) v.lane[j] = static_cast<signed char>(from[j]);
            return v;
        }
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
    template <int>
    V from_order() const {
        return *this;
    }
    void store_half(uint16_t* to) const {
        for (int j = 0; j < kPanel; ++j) to[j] = float_to_half(lane[j]);
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

#include "kernels_impl.h"

constexpr Kernels kTable = {"portable", product, rmsnorm, add, swiglu, softmax, dot, scale, store_fp16};

}  // namespace

const Kernels* portable_kernels() { return &kTable; }

}  // namespace tinyloop::cpu
