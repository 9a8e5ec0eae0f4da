// Every SIMD level against the portable one, bit for bit, over odd shapes; the portable one against doubles.
#include "cpu/kernels.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/slot_panel.h"
#include "levels.h"
#include "tinyloop/backend.h"

using namespace tinyloop::cpu;

namespace {

std::mt19937 random_bits(3);
float draw() { return static_cast<float>(random_bits()) / 2147483648.0f - 1.0f; }

std::vector<float> draws(size_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = draw();
    return out;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

void test_half() {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const uint16_t half = static_cast<uint16_t>(bits);
        if ((half & 0x7C00) == 0x7C00) continue;  // infinities and NaN are never stored
        if (float_to_half(half_to_float(half)) != half) CHECK(!"half -> float -> half");
    }
    CHECK(half_to_float(0x3C00) == 1.0f && half_to_float(0x0001) == 0x1p-24f && half_to_float(0xFBFF) == -65504.0f);
    CHECK(float_to_half(1e9f) == 0x7BFF && float_to_half(-1e9f) == 0xFBFF && float_to_half(std::nanf("")) == 0xFBFF);
    CHECK(float_to_half(1.0f + 0x1p-11f) == 0x3C00 && float_to_half(1.0f + 3 * 0x1p-11f) == 0x3C02);  // ties to even
    std::vector<float> values = {
        0.0f, -0.0f, 1e9f, -1e9f, std::nanf(""), std::numeric_limits<float>::infinity(), 0x1p-26f, 0x1.8p-25f};
    if (!std::getenv("TINYLOOP_TESTS_IN_BOCHS"))  // Bochs 2.7 rounds ties up, of AVX2 as of AVX-512
        values.insert(values.end(), {0x1p-25f, 1.0f + 0x1p-11f, 1.0f + 3 * 0x1p-11f, -1.0f - 0x1p-11f});
    while (values.size() < 4096) {
        uint32_t raw = static_cast<uint32_t>(random_bits());
        float value;
        std::memcpy(&value, &raw, 4);
        values.push_back(value);
    }
    std::vector<uint16_t> expected(values.size());
    for (size_t i = 0; i < values.size(); ++i) expected[i] = float_to_half(values[i]);
    for (const Kernels* k : levels()) {
        std::vector<uint16_t> out(values.size());
        k->store_fp16(values.data(), static_cast<int>(values.size()), out.data(), 1);
        CHECK(out == expected);
    }
}

void test_product() {
    const int most = 25, panels = 9, ldc = panels * kPanel;
    for (const int dtype : {static_cast<int>(TL_F32), static_cast<int>(TL_F16), static_cast<int>(TL_BF16)})
        for (const int inputs : {1, 16, 37, 256, 300, 600}) {
            const int lda = inputs + 3;
            std::vector<float> plain = draws(static_cast<size_t>(panels) * inputs * kPanel),
                               a = draws(static_cast<size_t>(most) * lda);
            std::vector<uint16_t> packed(plain.size());
            for (size_t i = 0; i < plain.size(); ++i) {
                uint32_t bits;
                std::memcpy(&bits, &plain[i], 4);
                packed[i] = dtype == TL_F16 ? float_to_half(plain[i]) : static_cast<uint16_t>(bits >> 16);
                if (dtype == TL_F16) plain[i] = half_to_float(packed[i]);
                if (dtype == TL_BF16) plain[i] = bfloat_to_float(packed[i]);
            }
            const void* data = dtype == TL_F32 ? static_cast<const void*>(plain.data()) : packed.data();
            const Panels w{data, dtype, inputs, static_cast<size_t>(inputs) * kPanel, panels};
            // The definition: one fused accumulator per output, inputs in order.
            std::vector<float> all(static_cast<size_t>(most) * ldc);
            for (int m = 0; m < most; ++m)
                for (int n = 0; n < ldc; ++n) {
                    float sum = 0;
                    for (int k = 0; k < inputs; ++k)
                        sum =
                            std::fma(a[static_cast<size_t>(m) * lda + k],
                                     plain[(static_cast<size_t>(n / kPanel) * inputs + k) * kPanel + n % kPanel], sum);
                    all[static_cast<size_t>(m) * ldc + n] = sum;
                }
            for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, most}) {
                const std::vector<float> expected(all.begin(), all.begin() + rows * ldc);
                std::vector<float> scratch(kPanel * (rows + 256));
                for (const Kernels* k : levels()) {
                    std::vector<float> c(expected.size());
                    k->product(w, {a.data(), lda}, rows, c.data(), ldc, nullptr, Put::store, 0, 4, scratch.data());
                    k->product(w, {a.data(), lda}, rows, c.data(), ldc, nullptr, Put::store, 4, panels, scratch.data());
                    CHECK(same(c, expected));
                    std::vector<int32_t> reversed(rows);
                    for (int m = 0; m < rows; ++m) reversed[m] = rows - 1 - m;
                    std::vector<float> added(expected.size(), 1.0f), wanted(expected.size());
                    k->product(w, {a.data(), lda}, rows, added.data(), ldc, reversed.data(), Put::add, 0, panels,
                               scratch.data());
                    for (int m = 0; m < rows; ++m)
                        for (int n = 0; n < ldc; ++n)
                            wanted[static_cast<size_t>(rows - 1 - m) * ldc + n] =
                                1.0f + expected[static_cast<size_t>(m) * ldc + n];
                    CHECK(same(added, wanted));
                }
            }
        }
}

void test_rows_of_floats() {
    for (const int n : {16, 32, 48, 512}) {
        const std::vector<float> x = draws(n), w = draws(n);
        std::vector<float> wide = x, portable_norm(n);
        for (float& g : wide) g *= 30;
        std::vector<float> portable_gate = wide;
        portable_kernels()->rmsnorm(x.data(), w.data(), 1e-5f, n, portable_norm.data());
        portable_kernels()->swiglu(portable_gate.data(), w.data(), n);
        for (const Kernels* k : levels()) {
            std::vector<float> norm(n), gate = wide, sum = x, scaled = x;
            CHECK(k->dot(x.data(), w.data(), n) == portable_kernels()->dot(x.data(), w.data(), n));
            k->rmsnorm(x.data(), w.data(), 1e-5f, n, norm.data());
            k->swiglu(gate.data(), w.data(), n);
            k->add(w.data(), n, sum.data());
            k->scale(scaled.data(), n, 3.0f);
            CHECK(same(norm, portable_norm) && same(gate, portable_gate));
            double squares = 0, worst = 0;
            for (const float v : x) squares += double(v) * v;
            for (int i = 0; i < n; ++i) {
                worst = std::max(worst, std::fabs(norm[i] - x[i] / std::sqrt(squares / n + 1e-5) * w[i]));
                const double g = 30.0f * x[i];
                worst = std::max(worst, std::fabs(gate[i] - g / (1 + std::exp(-g)) * w[i]) / 30);
                CHECK(sum[i] == x[i] + w[i] && scaled[i] == 3.0f * x[i]);
            }
            CHECK(worst < 2e-6);
        }
    }
}

// One span's keys and values in the layout of spans.h, its panels in any order in memory, beside what they mean.
struct TestSpan {
    TestSpan(int dtype, int head_dim, bool extreme) : plain_keys(kSpan * head_dim), plain_values(kSpan * head_dim) {
        const size_t element = cached_bytes(dtype), side = kPanel * head_dim * element;
        memory.resize(2 * kSpanPanels * side);
        scales.resize(2 * kSpan);
        for (float& scale : scales) scale = 0.01f + 0.02f * std::fabs(draw());
        span = {dtype, head_dim, dtype == kInt8 ? 2u * kPanel : kPanel, kPanel * kPanel, {}};
        for (int p = 0; p < kSpanPanels; ++p) {
            const int place = p * 7 % kSpanPanels;
            char* const at = memory.data() + 2 * place * side;
            span.panels[p] = {at, at + side, &scales[2 * kPanel * place], &scales[2 * kPanel * place + kPanel]};
            for (int slot = 0; slot < kPanel; ++slot)
                for (int k = 0; k < head_dim; ++k) {
                    const size_t plain = static_cast<size_t>(p * kPanel + slot) * head_dim + k;
                    plain_keys[plain] = put(at, key_at(dtype, slot, k), span.panels[p].key_scales[slot], extreme);
                    plain_values[plain] =
                        put(at + side, value_at(dtype, slot, k), span.panels[p].value_scales[slot], extreme);
                }
        }
    }

    float put(char* to, size_t index, float scale, bool extreme) const {
        const float value = draw();
        if (span.dtype == kInt8) {
            const int8_t byte = static_cast<int8_t>(extreme ? 127 : value * 127);
            reinterpret_cast<int8_t*>(to)[index] = byte;
            return byte * scale;
        }
        if (span.dtype == TL_F32) return reinterpret_cast<float*>(to)[index] = value;
        const uint16_t half = float_to_half(value);
        reinterpret_cast<uint16_t*>(to)[index] = half;
        return half_to_float(half);
    }

    Span span;
    std::vector<char> memory;
    std::vector<float> scales, plain_keys, plain_values;  // plain: (kSpan, head_dim)
};

struct TestRows {
    TestRows(int count_, int head_dim_, float size) : count(count_), head_dim(head_dim_), q(draws(count_ * head_dim_)) {
        for (float& x : q) x *= size;
        for (int m = 0; m < count; ++m) {
            begin.push_back(m % 3 ? 0 : static_cast<int>(random_bits() % 200));
            end.push_back(m % 4 == 1 ? kSpan : begin[m] + 1 + static_cast<int>(random_bits() % (kSpan - begin[m])));
        }
    }

    // Partials of rows first .. first + n - 1, computed together.
    std::vector<float> attend(const Kernels* k, const Span& span, int first, int n) const {
        std::vector<int16_t> q_int(q.size());
        std::vector<float> q_step(count), partials(n * partial_floats(head_dim));
        std::vector<char> scratch(attend_scratch(n, head_dim));
        for (int m = first; m < first + n; ++m)
            k->round_queries(&q[m * head_dim], head_dim, &q_int[m * head_dim], &q_step[m]);
        k->attend(span, {n, &q[first * head_dim], &q_int[first * head_dim], &q_step[first], &begin[first], &end[first],
                         partials.data(), scratch.data()});
        // What lies beyond the three numbers after the sums is not used.
        for (int m = 0; m < n; ++m) std::fill_n(&partials[m * partial_floats(head_dim) + head_dim + 2], 14, 0.0f);
        return partials;
    }

    // Row m's partial by definition: sum of weights * values, then the highest score and the sum of the weights.
    std::vector<double> expected(const TestSpan& span, int m) const {
        std::vector<double> out(head_dim + 2), scores(kSpan);
        double& highest = out[head_dim] = -1e300;
        for (int slot = begin[m]; slot < end[m]; ++slot) {
            for (int k = 0; k < head_dim; ++k)
                scores[slot] += double(q[m * head_dim + k]) * span.plain_keys[slot * head_dim + k];
            highest = std::max(highest, scores[slot]);
        }
        for (int slot = begin[m]; slot < end[m]; ++slot) {
            const double weight = std::exp(scores[slot] - highest);
            out[head_dim + 1] += weight;
            for (int k = 0; k < head_dim; ++k) out[k] += weight * span.plain_values[slot * head_dim + k];
        }
        return out;
    }

    int count, head_dim;
    std::vector<float> q;
    std::vector<int32_t> begin, end;
};

void test_attend() {
    for (const int dtype : {static_cast<int>(TL_F32), static_cast<int>(TL_F16), kInt8})
        for (const int head_dim : {16, 48, 64, 80, 128}) {
            const TestSpan span(dtype, head_dim, false);
            const TestRows rows(48, head_dim, 0.3f);
            const std::vector<float> all = rows.attend(portable_kernels(), span.span, 0, rows.count);
            const size_t size = partial_floats(head_dim);
            auto as_in_all = [&](const std::vector<float>& found, int first) {
                return std::memcmp(found.data(), &all[first * size], found.size() * 4) == 0;
            };
            for (const Kernels* k : levels()) {  // a row's bits do not depend on the rows beside it
                for (const int count : {2, 3, 4, 6, 7, 13, 19, 25, 48})
                    CHECK(as_in_all(rows.attend(k, span.span, 48 - count, count), 48 - count));
                for (int m = 0; m < rows.count; ++m) CHECK(as_in_all(rows.attend(k, span.span, m, 1), m));
            }
            double worst = 0;
            for (int m = 0; m < rows.count; ++m) {
                const std::vector<double> expected = rows.expected(span, m);
                const float* found = &all[m * size];
                worst = std::max(worst, std::fabs(found[head_dim] - expected[head_dim]));
                worst = std::max(worst, std::fabs(found[head_dim + 1] / expected[head_dim + 1] - 1));
                for (int k = 0; k < head_dim; ++k)
                    worst = std::max(worst, std::fabs(found[k] - expected[k]) / expected[head_dim + 1]);
            }
            CHECK(worst < (dtype == kInt8 ? 1e-3 : 5e-6));
        }
}

// The largest sums that an int8 span can make stay exact.
void test_attend_extremes() {
    const int head_dim = 1024;
    const TestSpan span(kInt8, head_dim, true);
    TestRows rows(1, head_dim, 0);
    std::fill(rows.q.begin(), rows.q.end(), 1e-6f);
    rows.begin[0] = 0;
    rows.end[0] = kSpan;
    const std::vector<double> expected = rows.expected(span, 0);
    for (const Kernels* k : levels()) {
        const std::vector<float> found = rows.attend(k, span.span, 0, 1);
        for (int i = 0; i < head_dim + 2; ++i) CHECK(std::fabs(found[i] / expected[i] - 1) < 1e-4);
    }
}

// Spans folded in order are the softmax over all of them, the same bits at every level.
void test_fold() {
    const int head_dim = 48;
    std::vector<TestSpan> spans;
    for (int s = 0; s < 3; ++s) spans.emplace_back(TL_F16, head_dim, false);
    const TestRows rows(9, head_dim, 5.0f);
    for (int m = 0; m < rows.count; ++m) {
        double highest = -1e300, total = 0;
        std::vector<double> wanted(head_dim);
        for (const TestSpan& span : spans) highest = std::max(highest, rows.expected(span, m)[head_dim]);
        for (const TestSpan& span : spans) {
            const std::vector<double> part = rows.expected(span, m);
            const double factor = std::exp(part[head_dim] - highest);
            total += part[head_dim + 1] * factor;
            for (int k = 0; k < head_dim; ++k) wanted[k] += part[k] * factor;
        }
        auto folded = [&](const Kernels* k) {
            std::vector<float> sum(partial_floats(head_dim)), out(head_dim);
            sum[head_dim] = kNoScore;
            for (const TestSpan& span : spans) k->fold(rows.attend(k, span.span, m, 1).data(), head_dim, sum.data());
            k->finish_attention(sum.data(), head_dim, out.data());
            return out;
        };
        const std::vector<float> portable = folded(portable_kernels());
        for (const Kernels* k : levels()) {
            const std::vector<float> out = folded(k);
            CHECK(same(out, portable));
            for (int i = 0; i < head_dim; ++i) CHECK(std::fabs(out[i] - wanted[i] / total) < 5e-6);
        }
    }
}

void test_rounding() {
    for (const Kernels* k : levels())
        for (const float size : {0.0f, 1.0f, 1e30f, 1e-36f}) {
            const int n = 64;
            std::vector<float> x = draws(n);
            for (float& v : x) v *= size;
            std::vector<int8_t> bytes(n), bytes_portable(n);
            std::vector<int16_t> words(n), words_portable(n);
            float step, step_portable;
            const float scale = k->store_int8(x.data(), n, bytes.data());
            k->round_queries(x.data(), n, words.data(), &step);
            CHECK(scale == portable_kernels()->store_int8(x.data(), n, bytes_portable.data()));
            portable_kernels()->round_queries(x.data(), n, words_portable.data(), &step_portable);
            CHECK(step == step_portable && bytes == bytes_portable && words == words_portable);
            for (int i = 0; i < n && size > 1e-30f; ++i)
                CHECK(std::fabs(bytes[i] * scale - x[i]) <= 0.5001f * scale &&
                      std::fabs(words[i] * step - x[i]) <= 0.51f * step);
        }
}

}  // namespace

int main(int argc, char** argv) {
    choose_levels(argc, argv);
    test_half();
    test_product();
    test_rows_of_floats();
    test_attend();
    test_attend_extremes();
    test_fold();
    test_rounding();
    return finish();
}
