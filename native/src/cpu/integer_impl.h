// Products of integer weights with quantised rows, and the quantising of rows, written once over types that the file
// that includes kernels_impl.h defines for its SIMD level. kernels_impl.h includes this, in its place.
//
// Within a group of 32 inputs the sums are of integers, exact, so their order is free. Every float that follows comes
// from one fixed expression, groups in order:
//   int8: c = fma(float(sum of w * q), row's group scale, c);  at the end c *= output's scale
//   int4: c = fma(float(sum of w * q), output's group scale * row's group scale, c)
//
// Panel layouts (inputs padded to 32 with zeros; all of a panel in one run of memory):
//   int8: [inputs/4][16][4] int8, then 16 float scales
//   int4: per group [4][16][4] bytes, then 16 fp16 scales. Byte [i][j][t] holds input 8 * i + t of output j in its low
//         half and input 8 * i + 4 + t in its high half, each plus 8.
//
// Needed: Bytes (16 outputs x 4 inputs): load(p), low(p), high(p): p's bytes, or the halves of them.
// Quad: load(q): 4 inputs of a row, for every output. kIntegerRows: how many sums fit the registers.
// Sums (16 int32): start(offsets), which it ignores, add(w, q), to_float.
// ShortSums (2 int16 per output: inputs k % 4 < 2, the others): the same, for w in 0..15.
// largest_magnitude(V, V): of 32 floats, as bits, so that it is not finite if one is not. store_int8(V, to): rounded to
// nearest even. group_offsets(q, to): see Activations.

// kOneRowPanels: panels that a tile of one row takes; kTogether: how many of those share what is read of the row.
// kAhead: groups that one row's weights are fetched ahead, none where the processor does that as well by itself.
struct Int8Format {
    using Part = Sums;
    static constexpr int kOneRowPanels = kIntegerRows, kTogether = 1, kAhead = 0;
    static constexpr int kBytes = kGroup * kPanel;  // of a group in a panel
    static Bytes quad(const char* group, int i) { return Bytes::load(group + i * 64); }
    static V add(V sum, V part, V row_scale, const char*) { return fma(part, row_scale, sum); }
    static V finish(V sum, const char* end) { return sum * V::load(reinterpret_cast<const float*>(end)); }
};

struct Int4Format {
    using Part = ShortSums;
    static constexpr int kOneRowPanels = 2, kTogether = 2, kAhead = 7;
    static constexpr int kBytes = kGroupBytes;
    static Bytes quad(const char* group, int i) {
        const char* bytes = group + i / 2 * 64;
        return i % 2 ? Bytes::high(bytes) : Bytes::low(bytes);
    }
    static V add(V sum, V part, V row_scale, const char* group) {
        return fma(part, V::load_as<TL_F16>(group + kGroup * kPanel / 2) * row_scale, sum);
    }
    static V finish(V sum, const char*) { return sum; }
};

template <class Format, int kRows, int kPanels>
[[gnu::noinline]] void integer_tile(const Panels& w, const Activations& a, const Out& out, int m0, int panel) {
    const char* from = static_cast<const char*>(w.data) + panel * w.panel_elements;
    const size_t ldq = static_cast<size_t>(a.ldq), ldg = static_cast<size_t>(a.ldg);
    const int8_t* q = a.q + m0 * ldq;
    const float* scales = a.scales + m0 * ldg;
    const int16_t* offsets = a.offsets + m0 * ldg * 2;
    V sum[kRows][kPanels];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) sum[m][p] = V::zero();
    constexpr int kTogether = kRows == 1 && kPanels % Format::kTogether == 0 ? Format::kTogether : 1;
    for (int k = 0; k < w.inputs; k += kGroup, from += Format::kBytes, q += kGroup, ++scales, offsets += 2) {
        if constexpr (kRows == 1 && Format::kAhead > 0) {  // not in a function: GCC drops calls of what only fetches
            const char* ahead = from + Format::kAhead * Format::kBytes;
            if (k + Format::kAhead * kGroup >= w.inputs) ahead += (kPanels - 1) * w.panel_elements;  // the next tile's
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 8
                for (int byte = 0; byte < Format::kBytes; byte += 64)
                    __builtin_prefetch(ahead + p * w.panel_elements + byte);
        }
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p += kTogether) {
            const char* group = from + p * w.panel_elements;
            typename Format::Part part[kRows][kTogether];
#pragma GCC unroll 16
            for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
                for (auto& one : part[m]) one = Format::Part::start(offsets + m * ldg * 2);
#pragma GCC unroll 8
            for (int i = 0; i < kGroup / 4; ++i)
#pragma GCC unroll 4
                for (int t = 0; t < kTogether; ++t) {
                    const Bytes weights = Format::quad(group + t * w.panel_elements, i);
#pragma GCC unroll 16
                    for (int m = 0; m < kRows; ++m) part[m][t].add(weights, Quad::load(q + m * ldq + i * 4));
                }
#pragma GCC unroll 16
            for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
                for (int t = 0; t < kTogether; ++t)
                    sum[m][p + t] = Format::add(sum[m][p + t], part[m][t].to_float(), V::set1(scales[m * ldg]),
                                                group + t * w.panel_elements);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p)
            out.put(m0 + m, panel + p, Format::finish(sum[m][p], from + p * w.panel_elements));
}

template <class Format, int kRows>
void integer_rows(int n, const Panels& w, const Activations& a, const Out& out, int m0, int begin, int end) {
    if constexpr (kRows > 0) {
        if (n != kRows) return integer_rows<Format, kRows - 1>(n, w, a, out, m0, begin, end);
        constexpr int kWide = kRows == 1 ? Format::kOneRowPanels : kIntegerRows / kRows;
        int panel = begin;
        for (; panel + kWide <= end; panel += kWide) integer_tile<Format, kRows, kWide>(w, a, out, m0, panel);
        for (; panel < end; ++panel) integer_tile<Format, kRows, 1>(w, a, out, m0, panel);
    }
}

// A panel stays in L1 while all tiles of rows use it; taking its bytes apart again for each tile costs less than
// keeping them unpacked (measured).
template <class Format>
void integer_product(const Panels& w, const Activations& a, int n_rows, const Out& out, int begin, int end) {
    const int tiles = (n_rows + kIntegerRows - 1) / kIntegerRows, block = tiles == 1 ? end - begin : 1;
    for (int panel = begin; panel < end; panel += block)
        for (int t = 0, m = 0; t < tiles; ++t) {
            const int n = (n_rows - m + tiles - t - 1) / (tiles - t);
            integer_rows<Format, kIntegerRows>(n, w, a, out, m, panel, panel + block);
            m += n;
        }
}

// A group with an infinity or a NaN gets scale NaN, so that its products are NaN, as the products of floats would be.
void quantize(const float* x, int n, int8_t* q, float* scales, int16_t* offsets) {
    for (int k = 0; k < n; k += kGroup, q += kGroup, ++scales, offsets += 2) {
        const V low = V::load(x + k), high = k + kPanel < n ? V::load(x + k + kPanel) : V::zero();
        const float top = largest_magnitude(low, high);
        const bool finite = top <= __FLT_MAX__;
        const bool plain = finite && top > 0x1p-100f;  // below, the factor could overflow: such a group is zeros
        *scales = plain ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
        const V factor = V::set1(plain ? 127.0f / top : 0.0f);
        store_int8(plain ? low * factor : V::zero(), q);
        store_int8(plain ? high * factor : V::zero(), q + kPanel);
        group_offsets(q, offsets);
    }
}
