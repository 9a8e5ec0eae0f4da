// The kernels, written once over the type V (16 floats) that the including file defines for its SIMD level, in an
// anonymous namespace. That file is compiled with its own instruction set, so nothing here may be an inline function of
// a shared header: the linker could pick the wide copy for a narrow machine.
//
// V needs: zero, set1, load, store, fma(a, b, c) = a * b + c fused, +, -, *, /, max, select_ge(x, bound) (x where
// x >= bound else 0), pow2_scale(p, t), store_half, load_as<dtype> (16 weights, in whatever order is cheapest) with
// to_order<dtype> (from that order to the outputs'). kTileRows = the most rows of a tile;
// kAccumulators = sums that fit the registers beside the weights and the activations.

constexpr size_t kBlock =
    128 << 10;                // bytes of weights that all tiles of rows use before the next are read: stay in L2
constexpr int kAhead = 2048;  // bytes that weights are fetched ahead; less leaves four and more rows waiting

template <int kDtype>
constexpr size_t element_bytes() {
    return kDtype == TL_F32 ? 4 : 2;
}

// How many panels a tile of `rows` takes. Few rows need several, so that enough sums are under way to hide the latency
// of the multiply-add and enough streams to fill the memory's. With 6 accumulators, 3 rows and 2 panels would need a
// register more than there are.
constexpr int panels_of(int rows) {
    const int fit = kAccumulators / rows;
    return kAccumulators == 6 && rows == 3 ? 1 : fit < 1 ? 1 : fit > 6 ? 6 : fit;
}

// Weights that later tiles will read: each two inputs of a tile fetch `step` bytes more of them into L2.
struct Ahead {
    const char* at;
    size_t step;
};

// Adds a[m][k] * w[p][k] to kRows x kPanels accumulators, k in order. Weights are converted in registers: the
// conversions run beside the multiply-adds, which makes them cheaper than unpacking even for many rows.
template <int kDtype, int kRows, int kPanels>
inline void tile(const char* w, size_t panel_bytes, const float* a, int lda, int inputs, Ahead ahead,
                 V (&sum)[kRows][kPanels]) {
    constexpr int kStep = kPanel * static_cast<int>(element_bytes<kDtype>());
    const auto weight = [&](int p, int k) {
        return V::load_as<kDtype>(w + p * panel_bytes + static_cast<size_t>(k) * kStep);
    };
    const auto step = [&](int k) {
        // Whichever there is more of passes through one register.
        if constexpr (kRows > kPanels) {
            V weights[kPanels];
#pragma GCC unroll 16
            for (int p = 0; p < kPanels; ++p) weights[p] = weight(p, k);
#pragma GCC unroll 16
            for (int m = 0; m < kRows; ++m) {
                const V x = V::set1(a[static_cast<size_t>(m) * lda + k]);
#pragma GCC unroll 16
                for (int p = 0; p < kPanels; ++p) sum[m][p] = fma(x, weights[p], sum[m][p]);
            }
        } else {
            V x[kRows];
#pragma GCC unroll 16
            for (int m = 0; m < kRows; ++m) x[m] = V::set1(a[static_cast<size_t>(m) * lda + k]);
#pragma GCC unroll 16
            for (int p = 0; p < kPanels; ++p) {
                const V one = weight(p, k);
#pragma GCC unroll 16
                for (int m = 0; m < kRows; ++m) sum[m][p] = fma(x[m], one, sum[m][p]);
            }
        }
    };
    int k = 0;
    if constexpr (kPanels == 1)  // one stream that is read slowly: the processor's own prefetch starts too late
        for (; k + 2 <= inputs; k += 2) {
            for (int byte = 0; byte < 2 * kStep; byte += 64)
                __builtin_prefetch(w + static_cast<size_t>(k) * kStep + kAhead + byte);
            __builtin_prefetch(ahead.at, 0, 2);
            ahead.at += ahead.step;
            step(k);
            step(k + 1);
        }
    for (; k < inputs; ++k) step(k);
}

struct Out {
    float* c;
    int ldc;
    const int32_t* rows;
    Put mode;
    float* at(int m, int panel) const { return c + static_cast<size_t>(rows ? rows[m] : m) * ldc + panel * kPanel; }
    void put(int m, int panel, V sum) const {
        float* to = at(m, panel);
        (mode == Put::add ? V::load(to) + sum : sum).store(to);
    }
};

template <int kDtype, int kRows, int kPanels>
void tile_of(const Panels& w, const float* a, int lda, const Out& out, int m0, int panel, Ahead ahead) {
    V sum[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) sum[m][p] = V::zero();
    const size_t panel_bytes = w.panel_elements * element_bytes<kDtype>();
    tile<kDtype, kRows, kPanels>(static_cast<const char*>(w.data) + panel * panel_bytes, panel_bytes,
                                 a + static_cast<size_t>(m0) * lda, lda, w.inputs, ahead, sum);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) out.put(m0 + m, panel + p, sum[m][p].template to_order<kDtype>());
}

// `n` panels from `panel` on, at most kPanels.
template <int kDtype, int kRows, int kPanels>
void tile_panels(int n, const Panels& w, const float* a, int lda, const Out& out, int m0, int panel, Ahead ahead) {
    if constexpr (kPanels > 1) {
        if (n < kPanels) return tile_panels<kDtype, kRows, kPanels - 1>(n, w, a, lda, out, m0, panel, ahead);
    }
    tile_of<kDtype, kRows, kPanels>(w, a, lda, out, m0, panel, ahead);
}

// `n` rows from m0 on, at most kRows. The panels are divided evenly: a tile of one or two would be a slow rest.
template <int kDtype, int kRows>
void tile_rows(int n, const Panels& w, const float* a, int lda, const Out& out, int m0, int begin, int end,
               Ahead ahead) {
    if constexpr (kRows > 1) {
        if (n < kRows) return tile_rows<kDtype, kRows - 1>(n, w, a, lda, out, m0, begin, end, ahead);
    }
    constexpr int kWide = panels_of(kRows);
    for (int tiles = (end - begin + kWide - 1) / kWide, panel = begin; tiles > 0; --tiles) {
        const int count = (end - panel + tiles - 1) / tiles;
        tile_panels<kDtype, kRows, kWide>(count, w, a, lda, out, m0, panel, ahead);
        panel += count;
        ahead.at += ahead.step * ((w.inputs + 1) / 2);
    }
}

template <int kDtype>
void product_as(const Panels& w, const float* a, int lda, int n_rows, const Out& out, int begin, int end) {
    const int tiles = (n_rows + kTileRows - 1) / kTileRows;
    const size_t panel_bytes = w.panel_elements * element_bytes<kDtype>();
    const int block = tiles == 1 ? end - begin : panel_bytes < kBlock ? static_cast<int>(kBlock / panel_bytes) : 1;
    for (int panel = begin, last; panel < end; panel = last) {
        last = end < panel + block ? end : panel + block;
        // All tiles fetch a part of the next block. The first one would else wait for memory, which idles beside the
        // rest.
        Ahead ahead{static_cast<const char*>(w.data) + last * panel_bytes, 0};
        if (tiles > 1 && last < w.panels) {
            const int next = w.panels - last < block ? w.panels - last : block;
            const size_t steps = static_cast<size_t>(tiles) * (last - panel) * ((w.inputs + 1) / 2);
            ahead.step = (next * panel_bytes + steps - 1) / steps;
        }
        for (int t = 0, m = 0; t < tiles; ++t) {
            const int n = (n_rows - m + tiles - t - 1) / (tiles - t);
            tile_rows<kDtype, kTileRows>(n, w, a, lda, out, m, panel, last, ahead);
            m += n;
            ahead.at += ahead.step * ((w.inputs + 1) / 2) * (last - panel);
        }
    }
}

#include "integer_impl.h"

void product(const Panels& w, const Activations& a, int n_rows, float* c, int ldc, const int32_t* rows, Put put,
             int begin, int end, float*) {
    const Out out{c, ldc, rows, put};
    switch (w.dtype) {
        case TL_F16:
            product_as<TL_F16>(w, a.x, a.ldx, n_rows, out, begin, end);
            break;
        case TL_BF16:
            product_as<TL_BF16>(w, a.x, a.ldx, n_rows, out, begin, end);
            break;
        case kInt8Weights:
            integer_product<Int8Format>(w, a, n_rows, out, begin, end);
            break;
        case kInt4Weights:
            integer_product<Int4Format>(w, a, n_rows, out, begin, end);
            break;
        default:
            product_as<TL_F32>(w, a.x, a.ldx, n_rows, out, begin, end);
    }
}

float tree_sum(V v) {
    float lane[kPanel];
    v.store(lane);
    for (int width = 8; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) lane[j] = lane[j] + lane[j + width];
    return lane[0];
}

// e^x for x <= 0 (Cephes-style range reduction, degree-6 polynomial, about 2 ulp); below e^-41 (2^-60) it is 0, so that
// products with finite values never underflow and adding a masked position never changes a sum, not even its sign.
__attribute__((always_inline)) inline V exp_negative(V x) {
    const V lowest = V::set1(-80.0f), magic = V::set1(12582912.0f);  // 1.5 * 2^23: rounds to an integer in the low bits
    const V clamped = max(x, lowest);
    const V t = fma(clamped, V::set1(1.44269504088896341f), magic);
    const V n = t - magic;
    V r = fma(n, V::set1(-0.693359375f), clamped);
    r = fma(n, V::set1(2.12194440e-4f), r);
    V p = V::set1(1.9875691500e-4f);
    p = fma(p, r, V::set1(1.3981999507e-3f));
    p = fma(p, r, V::set1(8.3334519073e-3f));
    p = fma(p, r, V::set1(4.1665795894e-2f));
    p = fma(p, r, V::set1(1.6666665459e-1f));
    p = fma(p, r, V::set1(5.0000001201e-1f));
    p = fma(p * r, r, r) + V::set1(1.0f);
    return select_ge(pow2_scale(p, t), V::set1(0x1p-60f));
}

void rmsnorm(const float* x, const float* weight, float eps, int n, float* y) {
    V squares = V::zero();
    for (int i = 0; i < n; i += kPanel) {
        const V v = V::load(x + i);
        squares = fma(v, v, squares);
    }
    const V factor = V::set1(1.0f / __builtin_sqrtf(tree_sum(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < n; i += kPanel) (V::load(x + i) * factor * V::load(weight + i)).store(y + i);
}

void add(const float* x, int n, float* y) {
    for (int i = 0; i < n; i += kPanel) (V::load(y + i) + V::load(x + i)).store(y + i);
}

void scale(float* x, int n, float factor) {
    for (int i = 0; i < n; i += kPanel) (V::load(x + i) * V::set1(factor)).store(x + i);
}

// silu(g) = g / (1 + e^-g), through e^-|g| so that the exponent is never positive.
void swiglu(float* gate, const float* up, int n) {
    const V one = V::set1(1.0f);
    for (int i = 0; i < n; i += kPanel) {
        const V g = V::load(gate + i);
        const V e = exp_negative(max(g, V::zero() - g) * V::set1(-1.0f));
        const V sigmoid = select_negative(g, e, one) / (one + e);
        (g * sigmoid * V::load(up + i)).store(gate + i);
    }
}

float dot(const float* a, const float* b, int n) {
    V sum = V::zero();
    for (int i = 0; i < n; i += kPanel) sum = fma(V::load(a + i), V::load(b + i), sum);
    return tree_sum(sum);
}

void store_fp16(const float* x, int n, uint16_t* out, size_t stride) {
    for (int i = 0; i < n; i += kPanel) {
        uint16_t half[kPanel];
        V::load(x + i).store_half(half);
        const int count = n - i < kPanel ? n - i : kPanel;
        for (int j = 0; j < count; ++j) out[static_cast<size_t>(i + j) * stride] = half[j];
    }
}

template <int kDtype>
void to_floats_as(const char* from, int n, float* to) {
    int i = 0;
    const auto sixteen = [](const char* at) { return V::load_as<kDtype>(at).template to_order<kDtype>(); };
    for (; i + kPanel <= n; i += kPanel) sixteen(from + i * element_bytes<kDtype>()).store(to + i);
    if (i == n) return;
    char rest[kPanel * 4] = {};
    float lane[kPanel];
    __builtin_memcpy(rest, from + i * element_bytes<kDtype>(), (n - i) * element_bytes<kDtype>());
    sixteen(rest).store(lane);
    __builtin_memcpy(to + i, lane, (n - i) * sizeof(float));
}

void to_floats(const void* from, int dtype, int n, float* to) {
    const char* bytes = static_cast<const char*>(from);
    if (dtype == TL_F16)
        to_floats_as<TL_F16>(bytes, n, to);
    else if (dtype == TL_BF16)
        to_floats_as<TL_BF16>(bytes, n, to);
    else
        to_floats_as<TL_F32>(bytes, n, to);
}
