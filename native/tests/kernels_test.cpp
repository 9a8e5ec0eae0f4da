// Every SIMD level against the portable one, bit for bit, over odd shapes; the portable one against doubles.
#include "cpu/kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
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

std::vector<const Kernels*> levels() {
    std::vector<const Kernels*> out;
    for (const Kernels* k : {portable_kernels(), avx2_kernels(), avx512_kernels()})
        if (k) out.push_back(k);
    return out;
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
    std::vector<float> values = {0.0f,     -0.0f,         1e9f,
                                 -1e9f,    std::nanf(""), std::numeric_limits<float>::infinity(),
                                 0x1p-25f, 0x1.8p-25f,    0x1p-26f};
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
    for (const int dtype : {static_cast<int>(TL_F32), static_cast<int>(TL_F16), static_cast<int>(TL_BF16), kInt8})
        for (const int inputs : {1, 16, 37, 256, 300, 600})
            for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25}) {
                const int panels = 9, lda = inputs + 3, ldc = panels * kPanel;
                std::vector<float> plain = draws(static_cast<size_t>(panels) * inputs * kPanel),
                                   a = draws(static_cast<size_t>(rows) * lda);
                std::vector<uint16_t> packed(plain.size());
                std::vector<int8_t> bytes(plain.size());
                for (size_t i = 0; i < plain.size(); ++i) {
                    uint32_t bits;
                    std::memcpy(&bits, &plain[i], 4);
                    packed[i] = dtype == TL_F16 ? float_to_half(plain[i]) : static_cast<uint16_t>(bits >> 16);
                    bytes[i] = static_cast<int8_t>(plain[i] * 127);
                    if (dtype == TL_F16) plain[i] = half_to_float(packed[i]);
                    if (dtype == TL_BF16) plain[i] = bfloat_to_float(packed[i]);
                    if (dtype == kInt8) plain[i] = bytes[i];
                }
                const void* data = dtype == TL_F32  ? static_cast<const void*>(plain.data())
                                   : dtype == kInt8 ? static_cast<const void*>(bytes.data())
                                                    : packed.data();
                const Panels w{data, dtype, inputs, static_cast<size_t>(inputs) * kPanel};
                // The definition: one fused accumulator per output, inputs in order.
                std::vector<float> expected(static_cast<size_t>(rows) * ldc);
                for (int m = 0; m < rows; ++m)
                    for (int n = 0; n < ldc; ++n) {
                        float sum = 0;
                        for (int k = 0; k < inputs; ++k)
                            sum = std::fma(a[static_cast<size_t>(m) * lda + k],
                                           plain[(static_cast<size_t>(n / kPanel) * inputs + k) * kPanel + n % kPanel],
                                           sum);
                        expected[static_cast<size_t>(m) * ldc + n] = sum;
                    }
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
                    // Going on from a sum gives the bits of one sum.
                    const int head = inputs / 3;
                    const size_t size = dtype == TL_F32 ? 4 : dtype == kInt8 ? 1 : 2;
                    const char* rest = static_cast<const char*>(data) + static_cast<size_t>(head) * kPanel * size;
                    std::vector<float> in_two(expected.size());
                    k->product({data, dtype, head, w.panel_elements}, {a.data(), lda}, rows, in_two.data(), ldc,
                               nullptr, Put::store, 0, panels, scratch.data());
                    k->product({rest, dtype, inputs - head, w.panel_elements}, {a.data() + head, lda}, rows,
                               in_two.data(), ldc, nullptr, Put::go_on, 0, panels, scratch.data());
                    CHECK(same(in_two, expected));
                }
            }
}

void test_rows_of_floats() {
    for (const int n : {16, 32, 48, 512}) {
        const std::vector<float> x = draws(n), w = draws(n);
        std::vector<float> first_norm, first_gate;
        for (const Kernels* k : levels()) {
            std::vector<float> norm(n), gate = x, sum = x, scaled = x;
            CHECK(k->dot(x.data(), w.data(), n) == portable_kernels()->dot(x.data(), w.data(), n));
            k->rmsnorm(x.data(), w.data(), 1e-5f, n, norm.data());
            for (float& g : gate) g *= 30;
            k->swiglu(gate.data(), w.data(), n);
            k->add(w.data(), n, sum.data());
            k->scale(scaled.data(), n, 3.0f);
            if (first_norm.empty()) {
                first_norm = norm;
                first_gate = gate;
            }
            CHECK(same(norm, first_norm) && same(gate, first_gate));
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

void test_softmax() {
    for (const int n : {1, 5, 15, 16, 17, 31, 100, 256}) {
        const int padded = pad16(n) + 32;
        std::vector<float> scores = draws(padded), first;
        float first_sum = 0;
        for (const Kernels* k : levels()) {
            std::vector<float> out = scores;
            const float sum = k->softmax(out.data(), 0, n, padded, 20.0f);
            if (first.empty()) {
                first = out;
                first_sum = sum;
            }
            CHECK(same(out, first) && sum == first_sum);
            double top = -1e30, total = 0, worst = 0;
            for (int i = 0; i < n; ++i) top = std::max(top, double(scores[i]) * 20);
            for (int i = 0; i < n; ++i) total += std::exp(double(scores[i]) * 20 - top);
            for (int i = 0; i < n; ++i)
                worst = std::max(worst, std::fabs(out[i] / sum - std::exp(double(scores[i]) * 20 - top) / total));
            for (int i = n; i < padded; ++i) CHECK(out[i] == 0);
            CHECK(worst < 2e-6);
            // The bits of a row do not depend on how far its work space reaches.
            std::vector<float> shorter(scores.begin(), scores.begin() + pad16(n));
            CHECK(k->softmax(shorter.data(), 0, n, pad16(n), 20.0f) == sum);
            CHECK(std::memcmp(shorter.data(), out.data(), shorter.size() * 4) == 0);
            // A row that begins later sees only what it sees.
            const int begin = n / 2;
            std::vector<float> late = scores;
            const float late_sum = k->softmax(late.data(), begin, n, padded, 20.0f);
            double late_top = -1e30, late_total = 0;
            for (int i = begin; i < n; ++i) late_top = std::max(late_top, double(scores[i]) * 20);
            for (int i = begin; i < n; ++i) late_total += std::exp(double(scores[i]) * 20 - late_top);
            for (int i = 0; i < padded; ++i) {
                const double wanted =
                    i < begin || i >= n ? 0 : std::exp(double(scores[i]) * 20 - late_top) / late_total;
                if (std::fabs(late[i] / late_sum - wanted) > 2e-6) CHECK(!"a window's weights");
            }
        }
    }
}

}  // namespace

int main() {
    for (const Kernels* k : levels()) std::printf("level %s\n", k->name);
    test_half();
    test_product();
    test_rows_of_floats();
    test_softmax();
    return finish();
}
