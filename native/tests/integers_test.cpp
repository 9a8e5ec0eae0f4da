// Integer weights: every SIMD level, row count and split of the panels against a plain reference, bit for bit.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "levels.h"
#include "tinyloop/backend.h"

using namespace tinyloop::cpu;

namespace {

std::mt19937 random_bits(5);
int draw(int low, int high) { return low + static_cast<int>(random_bits() % static_cast<unsigned>(high - low + 1)); }

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

// Weights in [output][input], and the same in panels.
struct Weights {
    int outputs, inputs, dtype;
    std::vector<int8_t> w;
    std::vector<float> scales;  // per output, or [output][group]
    std::vector<uint8_t> panels;
    size_t panel_bytes;

    Weights(int n, int k, int kind, bool extreme) : outputs(n), inputs(k), dtype(kind) {
        const bool int8 = dtype == kInt8Weights;
        const int low = int8 ? -128 : -8, high = int8 ? 127 : 7;  // the packer writes no -128, but a file may
        for (int i = 0; i < n * k; ++i)
            w.push_back(static_cast<int8_t>(extreme ? (draw(0, 7) ? high : low) : draw(low, high)));
        const int groups = int8 ? 1 : k / kGroup;
        for (int i = 0; i < n * groups; ++i)
            scales.push_back(half_to_float(float_to_half(static_cast<float>(draw(1, 1000)) / 4096.0f)));
        panel_bytes = int8 ? static_cast<size_t>(k) * kPanel + 64 : static_cast<size_t>(groups) * 288;
        panels.resize(panel_bytes * (n / kPanel));
        for (int o = 0; o < n; ++o) {
            uint8_t* panel = panels.data() + o / kPanel * panel_bytes;
            const int j = o % kPanel;
            if (int8) std::memcpy(panel + static_cast<size_t>(k) * kPanel + j * 4, &scales[o], 4);
            for (int i = 0; i < k; ++i) {
                const int value = w[static_cast<size_t>(o) * k + i];
                if (int8) {
                    panel[(i / 4 * kPanel + j) * 4 + i % 4] = static_cast<uint8_t>(value);
                    continue;
                }
                uint8_t* group = panel + i / kGroup * 288;
                const uint16_t half = float_to_half(scales[static_cast<size_t>(o) * groups + i / kGroup]);
                std::memcpy(group + 256 + j * 2, &half, 2);
                const int at = i % kGroup;
                group[(at / 8 * kPanel + j) * 4 + at % 4] |= static_cast<uint8_t>((value + 8) << (at % 8 / 4 * 4));
            }
        }
    }

    Panels view() const { return {panels.data(), dtype, inputs, panel_bytes}; }

    float product(int o, const int8_t* q, const float* row_scales) const {
        const int8_t* from = w.data() + static_cast<size_t>(o) * inputs;
        auto exact = [&](int begin, int end) {
            int64_t sum = 0;
            for (int i = begin; i < end; ++i) sum += from[i] * q[i];
            return static_cast<float>(sum);
        };
        float sum = 0;
        const int groups = inputs / kGroup;
        for (int g = 0; g < groups; ++g)
            sum = std::fma(
                exact(g * kGroup, (g + 1) * kGroup),
                dtype == kInt8Weights ? row_scales[g] : scales[static_cast<size_t>(o) * groups + g] * row_scales[g],
                sum);
        return dtype == kInt8Weights ? sum * scales[o] : sum;
    }
};

struct Rows {
    int inputs, groups;
    std::vector<int8_t> q;
    std::vector<float> scales;
    std::vector<int16_t> offsets;

    Rows(const Kernels& k, const std::vector<float>& x, int n, int inputs)
        : inputs(inputs), groups(inputs / kGroup), q(x.size()), scales(n * groups), offsets(n * groups * 2) {
        for (int m = 0; m < n; ++m)
            k.quantize(x.data() + m * inputs, inputs, q.data() + m * inputs, scales.data() + m * groups,
                       offsets.data() + m * groups * 2);
    }

    Activations view(int first = 0) const {
        const int group = first * groups;
        return {nullptr, 0, q.data() + first * inputs, inputs, scales.data() + group, offsets.data() + group * 2,
                groups};
    }
};

void test_product() {
    for (const int dtype : {kInt8Weights, kInt4Weights})
        for (const int inputs : {32, 64, 96, 352, 1408})
            for (const bool extreme : {false, true}) {
                const int panels = 7, n = panels * kPanel, most = 20;
                const Weights w(n, inputs, dtype, extreme);
                std::vector<float> x(static_cast<size_t>(most) * inputs);
                for (float& v : x) v = static_cast<float>(extreme ? (draw(0, 9) ? 1 : -1) : draw(-1000, 1000)) / 100;
                const Rows reference(*portable_kernels(), x, most, inputs);
                std::vector<float> expected(static_cast<size_t>(most) * n);
                for (int m = 0; m < most; ++m)
                    for (int o = 0; o < n; ++o)
                        expected[static_cast<size_t>(m) * n + o] = w.product(
                            o, reference.q.data() + m * inputs, reference.scales.data() + m * reference.groups);
                for (const Kernels* k : levels()) {
                    const Rows rows(*k, x, most, inputs);
                    CHECK(rows.q == reference.q && same(rows.scales, reference.scales) &&
                          rows.offsets == reference.offsets);
                    for (int count = 1; count <= most; ++count) {
                        const int split = draw(0, panels);
                        std::vector<float> c(static_cast<size_t>(count) * n);
                        k->product(w.view(), rows.view(), count, c.data(), n, nullptr, Put::store, 0, split, nullptr);
                        k->product(w.view(), rows.view(), count, c.data(), n, nullptr, Put::store, split, panels,
                                   nullptr);
                        CHECK(same(c, {expected.begin(), expected.begin() + static_cast<long>(c.size())}));
                    }
                    for (int m = 0; m < most; ++m) {  // alone, and added to another row's place
                        const int32_t to = 1;
                        std::vector<float> c(static_cast<size_t>(2) * n, 0.5f), wanted = c;
                        k->product(w.view(), rows.view(m), 1, c.data(), n, &to, Put::add, 0, panels, nullptr);
                        for (int o = 0; o < n; ++o) wanted[n + o] += expected[static_cast<size_t>(m) * n + o];
                        CHECK(same(c, wanted));
                    }
                }
            }
}

void test_quantize() {
    for (const int n : {1, 16, 17, 31, 32, 33, 100, 576}) {
        std::vector<float> x(pad16(n));
        for (int i = 0; i < n; ++i) x[i] = static_cast<float>(draw(-30000, 30000)) / 999;
        for (const Kernels* k : levels()) {
            const int groups = pad32(n) / kGroup;
            std::vector<int8_t> q(pad32(n), 99);
            std::vector<float> scales(groups, -1);
            std::vector<int16_t> offsets(groups * 2, 99);
            k->quantize(x.data(), n, q.data(), scales.data(), offsets.data());
            for (int g = 0; g < groups; ++g) {
                double largest = 0, worst = 0;
                int sums[2] = {};
                for (int i = g * kGroup; i < (g + 1) * kGroup; ++i) {
                    const double value = i < n ? x[i] : 0;
                    largest = std::max(largest, std::fabs(value));
                    worst = std::max(worst, std::fabs(q[i] * double(scales[g]) - value));
                    sums[i % 4 / 2] += q[i];
                }
                CHECK(std::fabs(scales[g] - largest / 127) <= 1e-6 * largest && worst <= scales[g] * 0.5001);
                CHECK(offsets[2 * g] == -8 * sums[0] && offsets[2 * g + 1] == -8 * sums[1]);
            }
        }
    }
}

// Groups that floats would turn into zeros or NaN; nothing may depend on the level.
void test_unusual_groups() {
    const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
    for (const float odd : {0.0f, -0.0f, 1e-45f, 0x1p-120f, 0x1p-90f, -3e38f, inf, -inf, nan})
        for (const int at : {0, 15, 16, 31}) {
            std::vector<float> x(48, std::fabs(odd) < 1 ? 0.0f : 1.0f);
            x[at] = odd;
            x[40] = 2;
            for (const Kernels* k : levels()) {
                std::vector<int8_t> q(64, 99), zeros(32, 0);
                std::vector<int16_t> offsets(4, 99);
                float scales[2] = {-1, -1};
                k->quantize(x.data(), 48, q.data(), scales, offsets.data());
                CHECK(scales[1] == 2.0f / 127.0f && q[40] == 127);  // the other group goes its own way
                q.resize(32);
                if (std::isfinite(odd)) {
                    const bool zero = std::fabs(odd) < 0x1p-100f;
                    CHECK(scales[0] == (zero ? 0.0f : std::fabs(odd) / 127.0f));
                    CHECK(q[at] == (zero ? 0 : odd < 0 ? -127 : 127));
                } else {
                    CHECK(std::isnan(scales[0]) && q == zeros && offsets[0] == 0 && offsets[1] == 0);
                }
            }
        }
}

}  // namespace

int main(int argc, char** argv) {
    choose_levels(argc, argv);
    test_quantize();
    test_unusual_groups();
    test_product();
    return finish();
}
