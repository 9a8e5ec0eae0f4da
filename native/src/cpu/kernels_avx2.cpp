// AVX2 + FMA + F16C: V is two 8-lane registers.
#include "kernels.h"
#include "tinyloop/backend.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <type_traits>

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
    void store_half(uint16_t* to) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half(low));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, half(high));
    }
    // The low bits of each element's representation.
    void store_low16(int16_t* to) const {
        const __m256i mask = _mm256_set1_epi32(0xFFFF);
        const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(low), mask),
                                                   _mm256_and_si256(_mm256_castps_si256(high), mask));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xD8));
    }
    void store_low8(int8_t* to) const {
        const __m256i mask = _mm256_set1_epi32(0xFF);
        const __m256i words = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(low), mask),
                                                  _mm256_and_si256(_mm256_castps_si256(high), mask));
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0xD8);
        const __m128i pairs = _mm256_castsi256_si128(bytes);  // 0-3 8-11 4-7 12-15
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi32(pairs, 0xD8));
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

constexpr int kIntegerRows = 4;  // 8 sums, 2 weights and their magnitudes, 1 activation, 1 product: 14 registers

// sum += x. Written out because GCC otherwise interleaves what all rows do, spills sums, and copies them around.
inline void add_int32(__m256i& sum, __m256i x) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }
inline void add_int16(__m256i& sum, __m256i x) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x)); }

struct Bytes {
    __m256i low_outputs, high_outputs;

    static __m256i at(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
    static __m256i half(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
    static Bytes load(const char* from) { return {at(from), at(from + 32)}; }
    static Bytes low(const char* from) { return {half(at(from)), half(at(from + 32))}; }
    static Bytes high(const char* from) {
        return {half(_mm256_srli_epi16(at(from), 4)), half(_mm256_srli_epi16(at(from + 32), 4))};
    }
};

struct Quad {
    __m256i all;
    static Quad load(const int8_t* q) {
        int32_t four;
        __builtin_memcpy(&four, q, 4);
        return {_mm256_set1_epi32(four)};
    }
};

struct Sums {
    __m256i low, high;

    static Sums start(const int16_t*) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    void add(Bytes w, Quad q) {
        add_int32(low, dot(w.low_outputs, q.all));
        add_int32(high, dot(w.high_outputs, q.all));
    }
    // The only product of bytes takes one side unsigned: the weights, whose sign moves to the row. A file may hold a
    // weight of -128, whose magnitude fits; a row never does. Two products stay below 2^15, so nothing saturates.
    static __m256i dot(__m256i w, __m256i q) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
        return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    V to_float() const { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }
};

struct ShortSums {
    __m256i low, high;

    static ShortSums start(const int16_t* offsets) {
        int32_t both;
        __builtin_memcpy(&both, offsets, 4);
        return {_mm256_set1_epi32(both), _mm256_set1_epi32(both)};
    }
    void add(Bytes w, Quad q) {
        add_int16(low, _mm256_maddubs_epi16(w.low_outputs, q.all));
        add_int16(high, _mm256_maddubs_epi16(w.high_outputs, q.all));
    }
    V to_float() const {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_cvtepi32_ps(_mm256_madd_epi16(low, ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(high, ones))};
    }
};

float largest_magnitude(V a, V b) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    auto bits = [&](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), magnitude); };
    const __m256i all =
        _mm256_max_epi32(_mm256_max_epi32(bits(a.low), bits(a.high)), _mm256_max_epi32(bits(b.low), bits(b.high)));
    __m128i best = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0x4E));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(best));
}

void store_int8(V x, int8_t* to) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}

#include "last_lanes.h"

float sum_of_lanes(V v) { return sum_of_eight(_mm256_add_ps(v.low, v.high)); }
float highest_lane(V v) { return highest_of_eight(_mm256_max_ps(v.low, v.high)); }

struct Pairs {
    __m256i low, high;

    static Pairs load(const char* from) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1)};
    }
    static Pairs widen(const char* from) {
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + 1))};
    }
    static Pairs set1(const int16_t* pair) {
        int32_t both;
        __builtin_memcpy(&both, pair, sizeof both);
        return {_mm256_set1_epi32(both), _mm256_set1_epi32(both)};
    }
    void store(char* to) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, high);
    }
};

struct PairSums {
    __m256i low, high;

    static PairSums zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    V to_floats() const { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }
};
PairSums add_products(PairSums sum, Pairs a, Pairs b) {
    add_int32(sum.low, _mm256_madd_epi16(a.low, b.low));
    add_int32(sum.high, _mm256_madd_epi16(a.high, b.high));
    return sum;
}

#include "kernels_impl.h"

#include "attention_impl.h"

constexpr Kernels kTable = {"avx2",     product,       rmsnorm, add,  swiglu,           dot,       scale,   store_fp16,
                            store_int8, round_queries, attend,  fold, finish_attention, to_floats, quantize};

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
