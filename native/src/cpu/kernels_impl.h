// The kernels, written once over the type V (16 floats) that the including file defines for its SIMD level, in an
// anonymous namespace. That file is compiled with its own instruction set, so nothing here may be an inline function of
// a shared header: the linker could pick the wide copy for a narrow machine.
//
// V needs: zero, set1, load, store, fma(a, b, c) = a * b + c fused, +, -, *, /, max, select_ge(x, bound) (x where
// x >= bound else 0), pow2_scale(p, t), load_as<dtype>, store_half. kTile = accumulators that fit the registers.

constexpr int kDirectTiles = 3;  // up to so many tiles of rows, converting again costs less than unpacking (measured)
constexpr int kChunk = 256;      // inputs per unpacked chunk: 16 KiB of floats, half of L1

template <int kDtype>
constexpr size_t element_bytes() {
    return kDtype == TL_F32 ? 4 : kDtype == kInt8 ? 1 : 2;
}

// Adds a[m][k] * w[p][k] to kRows x kPanels accumulators, k in order.
template <int kDtype, int kRows, int kPanels>
inline void tile(const char* w, size_t panel_bytes, const float* a, int lda, int inputs, V (&sum)[kRows][kPanels]) {
    for (int k = 0; k < inputs; ++k)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
            const V weight =
                V::load_as<kDtype>(w + p * panel_bytes + static_cast<size_t>(k) * kPanel * element_bytes<kDtype>());
#pragma GCC unroll 16
            for (int m = 0; m < kRows; ++m)
                sum[m][p] = fma(V::set1(a[static_cast<size_t>(m) * lda + k]), weight, sum[m][p]);
        }
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
    V start(int m, int panel) const { return mode == Put::go_on ? V::load(at(m, panel)) : V::zero(); }
};

// Few rows: weights are converted in registers, each used by kRows rows.
template <int kDtype, int kRows, int kPanels>
void direct(const Panels& w, const float* a, int lda, const Out& out, int m0, int panel) {
    V sum[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) sum[m][p] = out.start(m0 + m, panel + p);
    const size_t panel_bytes = w.panel_elements * element_bytes<kDtype>();
    tile<kDtype, kRows, kPanels>(static_cast<const char*>(w.data) + panel * panel_bytes, panel_bytes,
                                 a + static_cast<size_t>(m0) * lda, lda, w.inputs, sum);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) out.put(m0 + m, panel + p, sum[m][p]);
}

template <int kDtype, int kRows>
void direct_rows(const Panels& w, const float* a, int lda, const Out& out, int m0, int begin, int end) {
    // Two panels and three rows would need a register more than there are: the activations are kept for both.
    constexpr int kWide = kTile == 6 && kRows == 3 ? 1 : kTile / kRows > 0 ? kTile / kRows : 1;
    int panel = begin;
    for (; panel + kWide <= end; panel += kWide) direct<kDtype, kRows, kWide>(w, a, lda, out, m0, panel);
    for (; panel < end; ++panel) direct<kDtype, kRows, 1>(w, a, lda, out, m0, panel);
}

// Many rows: a chunk of a panel is unpacked once to floats in L1 and used by all rows; sums wait in `sums` (n_rows,
// 16).
template <int kRows>
void chunk_rows(const float* unpacked, int inputs, const float* a, int lda, float* sums) {
    V sum[kRows][1];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) sum[m][0] = V::load(sums + m * kPanel);
    tile<TL_F32, kRows, 1>(reinterpret_cast<const char*>(unpacked), 0, a, lda, inputs, sum);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) sum[m][0].store(sums + m * kPanel);
}

template <int kRows>
void chunk_any(int n, const float* unpacked, int inputs, const float* a, int lda, float* sums) {
    if constexpr (kRows > 0) {
        if (n == kRows)
            chunk_rows<kRows>(unpacked, inputs, a, lda, sums);
        else
            chunk_any<kRows - 1>(n, unpacked, inputs, a, lda, sums);
    }
}

template <int kDtype, int kRows>
void direct_any(int n, const Panels& w, const float* a, int lda, const Out& out, int m0, int begin, int end) {
    if constexpr (kRows > 0) {
        if (n == kRows)
            direct_rows<kDtype, kRows>(w, a, lda, out, m0, begin, end);
        else
            direct_any<kDtype, kRows - 1>(n, w, a, lda, out, m0, begin, end);
    }
}

template <int kDtype>
void product_as(const Panels& w, const float* a, int lda, int n_rows, const Out& out, int begin, int end,
                float* scratch) {
    const int tiles = (n_rows + kTile - 1) / kTile;
    if (tiles <= kDirectTiles) {
        const int block = tiles == 1 ? end - begin : 8;  // panels that stay in L2 while all tiles use them
        for (int panel = begin; panel < end; panel += block)
            for (int t = 0, m = 0; t < tiles; ++t) {
                const int n = (n_rows - m + tiles - t - 1) / (tiles - t);
                direct_any<kDtype, kTile>(n, w, a, lda, out, m, panel, end < panel + block ? end : panel + block);
                m += n;
            }
        return;
    }
    float* unpacked = scratch;
    float* sums = scratch + kChunk * kPanel;
    for (int panel = begin; panel < end; ++panel) {
        for (int m = 0; m < n_rows; ++m) out.start(m, panel).store(sums + m * kPanel);
        const char* source = static_cast<const char*>(w.data) + panel * w.panel_elements * element_bytes<kDtype>();
        for (int k0 = 0; k0 < w.inputs; k0 += kChunk) {
            const int inputs = w.inputs - k0 < kChunk ? w.inputs - k0 : kChunk;
            const char* chunk = source + static_cast<size_t>(k0) * kPanel * element_bytes<kDtype>();
            for (int k = 0; k < inputs; ++k)
                V::load_as<kDtype>(chunk + static_cast<size_t>(k) * kPanel * element_bytes<kDtype>())
                    .store(unpacked + k * kPanel);
            int m = 0;
            for (int t = 0; t < tiles; ++t) {
                const int n = (n_rows - m + tiles - t - 1) / (tiles - t);
                chunk_any<kTile>(n, unpacked, inputs, a + static_cast<size_t>(m) * lda + k0, lda, sums + m * kPanel);
                m += n;
            }
        }
        for (int m = 0; m < n_rows; ++m) out.put(m, panel, V::load(sums + m * kPanel));
    }
}

void product(const Panels& w, const Activations& a, int n_rows, float* c, int ldc, const int32_t* rows, Put put,
             int begin, int end, float* scratch) {
    const Out out{c, ldc, rows, put};
    switch (w.dtype) {
        case TL_F16:
            product_as<TL_F16>(w, a.x, a.ldx, n_rows, out, begin, end, scratch);
            break;
        case kInt8:
            product_as<kInt8>(w, a.x, a.ldx, n_rows, out, begin, end, scratch);
            break;
        case TL_BF16:
            product_as<TL_BF16>(w, a.x, a.ldx, n_rows, out, begin, end, scratch);
            break;
        default:
            product_as<TL_F32>(w, a.x, a.ldx, n_rows, out, begin, end, scratch);
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
V exp_negative(V x) {
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
        const V sigmoid = select_negative(g, e / (one + e), one / (one + e));
        (g * sigmoid * V::load(up + i)).store(gate + i);
    }
}

float softmax(float* scores, int begin, int n, int padded, float factor) {
    const V by = V::set1(factor);
    const int first = begin / kPanel * kPanel, last = (n + kPanel - 1) / kPanel * kPanel;  // the panels that count
    for (int i = first; i < begin; ++i) scores[i] = scores[begin];                         // neutral for the maximum
    for (int i = n; i < last; ++i) scores[i] = scores[begin];
    V top = V::load(scores + first) * by;
    for (int i = first + kPanel; i < last; i += kPanel) top = max(top, V::load(scores + i) * by);
    float lane[kPanel];
    top.store(lane);
    float best = lane[0];
    for (float value : lane) best = value > best ? value : best;
    const V highest = V::set1(best);
    for (int i = first; i < last; i += kPanel) exp_negative(V::load(scores + i) * by - highest).store(scores + i);
    for (int i = 0; i < begin; ++i) scores[i] = 0;
    for (int i = n; i < padded; ++i) scores[i] = 0;
    V sum = V::zero();
    for (int i = first; i < last; i += kPanel) sum = sum + V::load(scores + i);
    return tree_sum(sum);
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
