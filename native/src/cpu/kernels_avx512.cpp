// AVX-512 F/BW/VL/DQ: V is one register.
#include "kernels.h"
#include "tinyloop/backend.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
// GCC 12 takes the "undefined" operands inside its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

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
        if constexpr (kDtype == kInt8)
            return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        if constexpr (kDtype == TL_F16) return {_mm512_cvtph_ps(raw)};
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
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
        const __m512 clamped = _mm512_min_ps(_mm512_max_ps(all, _mm512_set1_ps(-65504.0f)), _mm512_set1_ps(65504.0f));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                            _mm512_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
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

#include "kernels_impl.h"

constexpr Kernels kTable = {"avx512", product, rmsnorm, add, swiglu, softmax, dot, scale, store_fp16};

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
