// AVX-512 F/BW/VL/DQ: V is one register.
#include "kernels.h"
#include "tinyloop/backend.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
// GCC 12 takes the "undefined" operands inside its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <type_traits>

namespace tinyloop::cpu {
namespace {

constexpr int kTileRows = 12, kAccumulators = 24;  // 24 registers of sums, 2 of weights, 1 activation: 27 of 32

struct V {
    __m512 all;

    static V zero() { return {_mm512_setzero_ps()}; }
    static V set1(float x) { return {_mm512_set1_ps(x)}; }
    static V load(const float* from) { return {_mm512_loadu_ps(from)}; }
    void store(float* to) const { _mm512_storeu_ps(to, all); }

    template <int kDtype>
    static V load_as(const char* from) {
        if constexpr (kDtype == TL_F32) return load(reinterpret_cast<const float*>(from));
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        if constexpr (kDtype == TL_F16) return {_mm512_cvtph_ps(raw)};
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
    }
    template <int>
    V to_order() const {
        return *this;
    }
    void store_half(uint16_t* to) const {
        const __m512 clamped = _mm512_min_ps(_mm512_max_ps(all, _mm512_set1_ps(-65504.0f)), _mm512_set1_ps(65504.0f));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                            _mm512_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    // The low bits of each element's representation.
    void store_low16(int16_t* to) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_castps_si512(all)));
    }
    void store_low8(int8_t* to) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_castps_si512(all)));
    }
};

V operator+(V a, V b) { return {_mm512_add_ps(a.all, b.all)}; }
V operator-(V a, V b) { return {_mm512_sub_ps(a.all, b.all)}; }
V operator*(V a, V b) { return {_mm512_mul_ps(a.all, b.all)}; }
V operator/(V a, V b) { return {_mm512_div_ps(a.all, b.all)}; }
V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
V max(V a, V b) { return {_mm512_max_ps(a.all, b.all)}; }
V select_ge(V x, V bound) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.all, bound.all, _CMP_GE_OQ), x.all)}; }
V select_negative(V key, V negative, V other) {
    return {
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask(key.all, _mm512_setzero_ps(), _CMP_LT_OQ), other.all, negative.all)};
}
V pow2_scale(V p, V t) {
    return {_mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p.all), _mm512_slli_epi32(_mm512_castps_si512(t.all), 23)))};
}

constexpr int kIntegerRows = 8;

struct Bytes {
    __m512i all;

    static __m512i half(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
    static Bytes load(const char* from) { return {_mm512_loadu_si512(from)}; }
    static Bytes low(const char* from) { return {half(load(from).all)}; }
    static Bytes high(const char* from) { return {half(_mm512_srli_epi16(load(from).all, 4))}; }
};

struct Quad {
    __m512i all;
    static Quad load(const int8_t* q) {
        int32_t four;
        __builtin_memcpy(&four, q, 4);
        return {_mm512_set1_epi32(four)};
    }
};

struct Sums {
    __m512i all;

    static Sums start(const int16_t*) { return {_mm512_setzero_si512()}; }
    // As in kernels_avx2.cpp, with the sign moved by a masked negation.
    void add(Bytes w, Quad q) {
        const __m512i turned = _mm512_mask_sub_epi8(q.all, _mm512_movepi8_mask(w.all), _mm512_setzero_si512(), q.all);
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w.all), turned);
        all = _mm512_add_epi32(all, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    V to_float() const { return {_mm512_cvtepi32_ps(all)}; }
};

struct ShortSums {
    __m512i all;

    static ShortSums start(const int16_t* offsets) {
        int32_t both;
        __builtin_memcpy(&both, offsets, 4);
        return {_mm512_set1_epi32(both)};
    }
    void add(Bytes w, Quad q) { all = _mm512_add_epi16(all, _mm512_maddubs_epi16(w.all, q.all)); }
    V to_float() const { return {_mm512_cvtepi32_ps(_mm512_madd_epi16(all, _mm512_set1_epi16(1)))}; }
};

float largest_magnitude(V a, V b) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    auto bits = [&](V x) { return _mm512_and_si512(_mm512_castps_si512(x.all), magnitude); };
    const int best = _mm512_reduce_max_epi32(_mm512_max_epi32(bits(a), bits(b)));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(best)));
}

void store_int8(V x, int8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.all)));
}

#include "last_lanes.h"

__m256 upper(V v) { return _mm512_extractf32x8_ps(v.all, 1); }
float sum_of_lanes(V v) { return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(v.all), upper(v))); }
float highest_lane(V v) { return highest_of_eight(_mm256_max_ps(_mm512_castps512_ps256(v.all), upper(v))); }

struct Pairs {
    __m512i all;

    static Pairs load(const char* from) { return {_mm512_loadu_si512(from)}; }
    static Pairs widen(const char* from) {
        return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
    }
    static Pairs set1(const int16_t* pair) {
        int32_t both;
        __builtin_memcpy(&both, pair, sizeof both);
        return {_mm512_set1_epi32(both)};
    }
    void store(char* to) const { _mm512_storeu_si512(to, all); }
};

struct PairSums {
    __m512i all;

    static PairSums zero() { return {_mm512_setzero_si512()}; }
    V to_floats() const { return {_mm512_cvtepi32_ps(all)}; }
};
PairSums add_products(PairSums sum, Pairs a, Pairs b) {
    return {_mm512_add_epi32(sum.all, _mm512_madd_epi16(a.all, b.all))};
}

#include "kernels_impl.h"

#include "attention_impl.h"

constexpr Kernels kTable = {"avx512",   product,       rmsnorm, add,  swiglu,           dot,       scale,   store_fp16,
                            store_int8, round_queries, attend,  fold, finish_attention, to_floats, quantize};

}  // namespace

const Kernels* avx512_kernels() {
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return runs ? &kTable : nullptr;
}

}  // namespace tinyloop::cpu

#else
namespace tinyloop::cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace tinyloop::cpu
#endif
