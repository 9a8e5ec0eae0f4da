// AVX2 + FMA + F16C: V is two 8-lane registers.
#include "kernels.h"
#include "tinyloop/backend.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace tinyloop::cpu {
namespace {

constexpr int kTileRows = 6, kAccumulators = 6;  // 12 registers of sums, 2 of weights, 1 activation: 15 of 16

alignas(32) constexpr int32_t kUpper[8] = {-65536, -65536, -65536, -65536, -65536, -65536, -65536, -65536};

struct V {
    __m256 low, high;

    static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static V load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    void store(float* to) const {
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
    }

    template <int kDtype>
    static V load_as(const char* from) {
        if constexpr (kDtype == TL_F32) return load(reinterpret_cast<const float*>(from));
        if constexpr (kDtype == kInt8) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
        }
        if constexpr (kDtype == TL_BF16) {  // as pairs: the even ones first, then the odd ones
            const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            const int32_t* mask = kUpper;
            __asm__("" : "+r"(mask));  // read where it is used: a register for it would be one too many
            return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
                    _mm256_castsi256_ps(_mm256_and_si256(pairs, *reinterpret_cast<const __m256i*>(mask)))};
        }
        const __m128i* halves = reinterpret_cast<const __m128i*>(from);
        return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
    }
    template <int kDtype>
    V to_order() const {
        if constexpr (kDtype != TL_BF16) return *this;
        const __m256 first = _mm256_unpacklo_ps(low, high), second = _mm256_unpackhi_ps(low, high);
        return {_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31)};
    }
    template <int kDtype>
    V from_order() const {
        if constexpr (kDtype != TL_BF16) return *this;
        const __m256 even = _mm256_shuffle_ps(low, high, 0x88), odd = _mm256_shuffle_ps(low, high, 0xDD);
        const auto middle = [](__m256 x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xD8)); };
        return {middle(even), middle(odd)};
    }
    void store_half(uint16_t* to) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half(low));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, half(high));
    }
    static __m128i half(__m256 x) {
        const __m256 clamped = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-65504.0f)), _mm256_set1_ps(65504.0f));
        return _mm256_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
};

V operator+(V a, V b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
V operator-(V a, V b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
V operator*(V a, V b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
V operator/(V a, V b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
V max(V a, V b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
V select_ge(V x, V bound) {
    return {_mm256_and_ps(x.low, _mm256_cmp_ps(x.low, bound.low, _CMP_GE_OQ)),
            _mm256_and_ps(x.high, _mm256_cmp_ps(x.high, bound.high, _CMP_GE_OQ))};
}
__m256 negative_mask(__m256 key) { return _mm256_cmp_ps(key, _mm256_setzero_ps(), _CMP_LT_OQ); }
V select_negative(V key, V negative, V other) {
    return {_mm256_blendv_ps(other.low, negative.low, negative_mask(key.low)),
            _mm256_blendv_ps(other.high, negative.high, negative_mask(key.high))};
}
__m256 pow2_scale(__m256 p, __m256 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
V pow2_scale(V p, V t) { return {pow2_scale(p.low, t.low), pow2_scale(p.high, t.high)}; }

#include "kernels_impl.h"

constexpr Kernels kTable = {"avx2", product, rmsnorm, add, swiglu, softmax, dot, scale, store_fp16};

}  // namespace

const Kernels* avx2_kernels() {
    // F16C is older than AVX2: every processor with the second has the first, and clang cannot be asked for it.
    const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return runs ? &kTable : nullptr;
}

}  // namespace tinyloop::cpu

#else
namespace tinyloop::cpu {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace tinyloop::cpu
#endif
