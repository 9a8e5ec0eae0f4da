// The instruction that the products are made of, as the emulator has it, against plain loops over the tables of the
// PTX ISA; and the one order of sums (fragments.h): the rows of every kernel and every number of rows have the same
// bits, close to sums in double precision, whatever the other rows hold.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/emulator/controls.h"
#include "few_rows.h"
#include "many_rows.h"

extern "C" tinyloop_emulator_controls* tinyloop_emulator(void);

using namespace tinyloop::gpu;

namespace {

// ---------------------------------------------------------------- the instruction

struct Instruction {
    const float *a, *b, *c;  // (16, 8), (8, 8), (16, 8)
    float* d;
    int swapped;  // planted: lanes that exchange their parts of a (their numbers differ in this bit)
};

// PTX ISA, "Matrix Fragments for mma.m16n8k8", .tf32: row and column of each register, by lane.
void one_instruction(const Instruction m) {
    const int group = static_cast<int>(threadIdx.x) >> 2, in_group = threadIdx.x % 4;
    float a[4], sums[4];
    for (int i = 0; i < 4; ++i) {
        const int row = i == 0 || i == 2 ? group : group + 8, col = i < 2 ? in_group : in_group + 4;
        a[i] = m.a[row * 8 + col];
        if (m.swapped) a[i] = __shfl_xor_sync(~0u, a[i], m.swapped);
        sums[i] = m.c[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)];
    }
    multiply_add(sums, a, m.b[in_group * 8 + group], m.b[(in_group + 4) * 8 + group]);
    for (int i = 0; i < 4; ++i) m.d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = sums[i];
}

std::mt19937 numbers(5);
float number() { return static_cast<float>(numbers() % 4096) / 1024.0f - 2.0f; }

void test_instruction() {
    float a[16 * 8], b[8 * 8], c[16 * 8], d[16 * 8];
    for (float& x : a) x = to_tf32(number());
    for (float& x : b) x = to_tf32(number());
    for (float& x : c) x = number();
    Device device(0);
    for (const int swapped : {0, 1, 16}) {
        launch(device, dim3(1), 32, 0, one_instruction, Instruction{a, b, c, d, swapped});
        bool same = true;
        for (int m = 0; m < 16; ++m)
            for (int n = 0; n < 8; ++n) {
                float sum = c[m * 8 + n];
                for (int k = 0; k < 8; ++k) sum += a[m * 8 + k] * b[k * 8 + n];
                same = same && sum == d[m * 8 + n];
            }
        CHECK(same == !swapped);
    }
    a[3] = 1.0f + 1.0f / 2048;  // one bit more than tf32 has
    std::string error;
    try {
        launch(device, dim3(1), 32, 0, one_instruction, Instruction{a, b, c, d, 0});
    } catch (const std::runtime_error& caught) {
        error = caught.what();
    }
    CHECK(error.find("not one of tf32") != std::string::npos);
}

void test_cut() {
    for (int i = 0; i < 1000; ++i) {
        const float x = std::ldexp(number() + 1e-7f * number(), static_cast<int>(numbers() % 60) - 30);
        const Cut both = cut(x);
        CHECK(to_tf32(both.high) == both.high && to_tf32(both.low) == both.low);
        CHECK(std::fabs(double(both.high) + double(both.low) - double(x)) <= std::ldexp(std::fabs(double(x)), -23));
    }
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK(cut(infinity).high == infinity && cut(infinity).low == 0);
    CHECK(std::isnan(cut(std::nanf("")).high));
}

// ---------------------------------------------------------------- the kernels

struct Case {
    int inputs, outputs, dtype;
};

enum Kernel { kFew, kMore, kMany, kFewWide, kMoreWide, kManyWide };

template <int kDtype>
std::vector<float> run(int kernel, const Case& c, const std::vector<char>& weights, const std::vector<float>& inputs,
                       int rows) {
    const int width = padded(c.inputs, 4);
    std::vector<tl_row> row(static_cast<size_t>(rows));
    std::vector<int32_t> entries, loops(static_cast<size_t>(rows), 1);
    for (int i = 0; i < rows; ++i) entries.push_back(i);
    std::vector<float> out(static_cast<size_t>(rows * c.outputs));
    Product p{};
    p.rows.row = row.data();
    p.rows.loops_run = loops.data();
    p.list = {entries.data(), rows, -1};
    p.weights = weights.data();
    p.inputs = c.inputs;
    p.stride = padded(c.inputs, 8);
    p.outputs = c.outputs;
    p.units = 1;
    p.from = inputs.data();
    p.from_width = width;
    p.to = out.data();
    p.to_width = c.outputs;
    Device device(0);
    const auto start = [&](auto* function, int of_block, int at_once, size_t shared) {
        p.width = p.pitch = at_once;
        const auto cut = [](int count, int by) { return static_cast<unsigned>((count + by - 1) / by); };
        launch(device, dim3(cut(rows, of_block), cut(c.outputs, at_once)), kThreads, shared, function, p);
    };
    const auto few = [&](auto rows_, auto outputs_) {
        constexpr int r = decltype(rows_)::value, o = decltype(outputs_)::value;
        start(few_rows<kDtype, r, o>, r * 8, o * 16, few_rows_shared<kDtype, r, o>(o * 16));
    };
    const auto many = [&](auto tiles) {
        using Many = ManyRows<kDtype, decltype(tiles)::value>;
        start(many_rows<kDtype, decltype(tiles)::value>, Many::kRows, Many::kOutputs,
              many_rows_shared<kDtype, decltype(tiles)::value>());
    };
    constexpr std::integral_constant<int, 1> k1;
    constexpr std::integral_constant<int, 2> k2;
    constexpr std::integral_constant<int, 4> k4;
    switch (kernel) {
        case kFew:
            few(k1, k1);
            break;
        case kMore:
            few(k4, std::integral_constant<int, kDtype == TL_F32 ? 1 : 2>());
            break;
        case kMany:
            many(k2);
            break;
        default:  // larger parts; there are none for fp32
            if constexpr (kDtype != TL_F32) {
                if (kernel == kFewWide) few(k1, k2);
                if (kernel == kMoreWide) few(k4, k4);
                if (kernel == kManyWide) many(k4);
            }
    }
    return out;
}

template <int kDtype>
void test_products(const Case& c) {
    constexpr int kRows = 150, kMost = 37;  // the last rows tell whether a place in the tile matters
    const int width = padded(c.inputs, 4), stride = padded(c.inputs, 8);
    std::vector<char> weights(static_cast<size_t>(c.outputs * stride) * (kDtype == TL_F32 ? 4 : 2));
    std::vector<double> plain(static_cast<size_t>(c.outputs * c.inputs));
    for (int o = 0; o < c.outputs; ++o)
        for (int k = 0; k < c.inputs; ++k) {
            float w = number() * (kDtype == TL_F32 ? 1.01f : 1.0f);
            const auto at = static_cast<size_t>(o * stride + k);
            uint32_t bits;
            if (kDtype != TL_F32) w = kDtype == TL_F16 ? half_to_float(float_to_half(w)) : std::trunc(w * 64) / 64;
            std::memcpy(&bits, &w, 4);
            const uint16_t half = kDtype == TL_F16 ? float_to_half(w) : static_cast<uint16_t>(bits >> 16);
            if (kDtype == TL_F32)
                std::memcpy(&weights[at * 4], &w, 4);
            else
                std::memcpy(&weights[at * 2], &half, 2);
            plain[static_cast<size_t>(o * c.inputs + k)] = double(w);
        }
    std::vector<float> inputs(static_cast<size_t>(kRows * width), std::nanf(""));  // also between the rows
    for (int r = 0; r < kRows; ++r)
        for (int k = 0; k < c.inputs; ++k) inputs[static_cast<size_t>(r * width + k)] = number() * 1.0003f;
    for (int k = 0; k < c.inputs; ++k) inputs[static_cast<size_t>(5 * width + k)] = std::nanf("");  // a whole row

    const auto whole = run<kDtype>(kMany, c, weights, inputs, kRows);
    for (int r = 0; r < kRows; ++r)
        for (int o = 0; o < c.outputs; ++o) {
            const float found = whole[static_cast<size_t>(r * c.outputs + o)];
            if (r == 5) {
                CHECK(std::isnan(found));
                continue;
            }
            double sum = 0, size = 0;
            for (int k = 0; k < c.inputs; ++k) {
                const double term =
                    plain[static_cast<size_t>(o * c.inputs + k)] * double(inputs[static_cast<size_t>(r * width + k)]);
                sum += term;
                size += std::fabs(term);
            }
            CHECK(std::fabs(sum - double(found)) <= 1e-6 * size + 1e-30);
        }
    // A row of `whole` alone, and each number of rows by each kernel, from different rows on.
    const std::pair<int, int> runs[] = {{kFew, 1},       {kFew, 7},      {kFew, 8},       {kFew, 9},
                                        {kMore, 1},      {kMore, 9},     {kMore, kMost},  {kMany, 1},
                                        {kMany, 64},     {kFewWide, 1},  {kFewWide, 9},   {kMoreWide, 9},
                                        {kMoreWide, 33}, {kManyWide, 1}, {kManyWide, 140}};
    int first = 1;
    for (const auto& [kernel, rows] : runs) {
        if (kDtype == TL_F32 && kernel >= kFewWide) continue;
        const std::vector<float> some(inputs.begin() + first * width, inputs.begin() + (first + rows) * width);
        const auto found = run<kDtype>(kernel, c, weights, some, rows);
        CHECK(std::memcmp(found.data(), &whole[static_cast<size_t>(first * c.outputs)], found.size() * 4) == 0);
        first = (first + 3) % 10;
    }
}

}  // namespace

int main() {
    test_instruction();
    test_cut();
    tinyloop_emulator()->order = TL_ORDER_SHUFFLED;
    test_products<TL_F16>({531, 41, TL_F16});  // slices of 96, the last shorter
    test_products<TL_BF16>({34, 16, TL_BF16});
    test_products<TL_F32>({1100, 20, TL_F32});  // pieces of a slice
    return finish();
}
