// Attention's kernels, written once over the types that the including file defines for its SIMD level (see
// kernels_impl.h, which comes before this one and whose exponential this uses): V, 16 floats; Pairs, 16 pairs of int16;
// PairSums, 16 int32.
//
// Pairs needs: load, store, widen (32 int8), set1 (a pair). PairSums needs: zero, to_floats. add_products(sums, a, b):
// each sum plus both products of its pair. V needs store_low16, store_low8 (the low bits of each element's
// representation), highest, sum_of_lanes.

// No sum of products can leave 32 bits: 127 * kQueryLimit * 1024 dimensions, 127 * kWeightLimit * 256 slots.
constexpr float kQueryLimit = 16383.0f, kWeightLimit = 32767.0f;
constexpr int kSlotsAhead = 8192;  // bytes that keys and values are fetched ahead: four panels of fp16
constexpr int kConvertTiles = 3;   // up to so many tiles of rows, converting again costs less than unpacking (measured)

// An arithmetic says how one step of a contraction reads 16 outputs' operands and what it multiplies them with.
template <int kDtype>
struct Converting {
    using Sum = V;
    using Broadcast = float;
    using Unpacked = Converting<TL_F32>;
    static constexpr int kDepth = 1;  // inputs per step
    static constexpr size_t kBytes = kPanel * element_bytes<kDtype>();
    static V load(const char* from) { return V::load_as<kDtype>(from); }
    static V broadcast(const float* a) { return V::set1(*a); }
    static V multiply_add(V a, V b, V sum) { return fma(a, b, sum); }
    static void unpack(const char* from, char* to) { load(from).store(reinterpret_cast<float*>(to)); }
};

struct Wide {
    using Sum = PairSums;
    using Broadcast = int16_t;
    using Unpacked = Wide;
    static constexpr int kDepth = 2;
    static constexpr size_t kBytes = 2 * kPanel * sizeof(int16_t);
    static Pairs load(const char* from) { return Pairs::load(from); }
    static Pairs broadcast(const int16_t* a) { return Pairs::set1(a); }
    static PairSums multiply_add(Pairs a, Pairs b, PairSums sum) { return add_products(sum, a, b); }
};

struct Widening : Wide {
    static constexpr size_t kBytes = 2 * kPanel;
    static Pairs load(const char* from) { return Pairs::widen(from); }
    static void unpack(const char* from, char* to) { load(from).store(to); }
};

// Adds a[m][k] * w[p][k] to kRows x kPanels accumulators, k in order. `steps` is even. A row or two wait for memory,
// which is read in the order of the addresses: all panels of a head's keys, or of its values.
template <class A, int kRows, int kPanels>
inline void contract(const char* const (&w)[kPanels], size_t step_bytes, int steps, const typename A::Broadcast* a,
                     size_t lda, typename A::Sum (&sum)[kRows][kPanels]) {
    for (int pair = 0; pair < steps; pair += 2) {
        if constexpr (kRows <= 2)
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) __builtin_prefetch(w[p] + pair * step_bytes + kSlotsAhead);
#pragma GCC unroll 2
        for (int k = pair; k < pair + 2; ++k)
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                const auto operand = A::load(w[p] + k * step_bytes);
#pragma GCC unroll 16
                for (int m = 0; m < kRows; ++m)
                    sum[m][p] = A::multiply_add(A::broadcast(a + m * lda + A::kDepth * k), operand, sum[m][p]);
            }
    }
}

template <class Sum, int kRows, int kPanels>
inline void clear(Sum (&sum)[kRows][kPanels]) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) sum[m][p] = Sum::zero();
}

// Calls f with the integral constant n, 1 <= n <= kMost.
template <int kMost, class F>
inline void with_constant(int n, const F& f) {
    if constexpr (kMost > 0) {
        if (n == kMost)
            f(std::integral_constant<int, kMost>());
        else
            with_constant<kMost - 1>(n, f);
    }
}

// Panels that kRows rows take at once: two registers of accumulators stay free for what is converted and broadcast.
template <int kRows>
constexpr int kMostPanels = 4 * kRows <= kAccumulators - 2   ? 4
                            : 2 * kRows <= kAccumulators - 2 ? 2
                                                             : 1;

// Calls f(first, constant count) for panels begin .. end - 1, in blocks.
template <int kMost, class F>
inline void in_blocks(int begin, int end, const F& f) {
    for (; begin + kMost <= end; begin += kMost) f(begin, std::integral_constant<int, kMost>());
    if constexpr (kMost > 1) in_blocks<kMost / 2>(begin, end, f);
}

// Rows m, m + 1, ... of a call that share registers, and the panels of slots that any of them sees.
struct RowTile {
    int m, count, first, last;
};

struct RowTiles {
    explicit RowTiles(const AttendRows& rows) : count((rows.count + kTileRows - 1) / kTileRows) {
        for (int t = 0, m = 0; t < count; ++t) {
            const int n = (rows.count - m + count - t - 1) / (count - t);
            int begin = rows.begin[m], end = rows.end[m];
            for (int i = m + 1; i < m + n; ++i) {
                begin = rows.begin[i] < begin ? rows.begin[i] : begin;
                end = rows.end[i] > end ? rows.end[i] : end;
            }
            tiles[t] = {m, n, begin / kPanel, (end + kPanel - 1) / kPanel};
            first = t == 0 || tiles[t].first < first ? tiles[t].first : first;
            last = tiles[t].last > last ? tiles[t].last : last;
            m += n;
        }
    }
    RowTile tiles[kAttendRows];
    int count, first = 0, last = 0;
};

struct Scratch {
    Scratch(char* at, int rows)
        : scores(reinterpret_cast<float*>(at)),
          weights(reinterpret_cast<int16_t*>(scores + static_cast<size_t>(rows) * kSpan)),
          unpacked(reinterpret_cast<char*>(weights + static_cast<size_t>(rows) * kSpan)) {}
    float* scores;     // (rows, kSpan)
    int16_t* weights;  // (rows, kSpan), of int8 spans
    char* unpacked;
};

inline V score_of(V sum, const SlotPanel&, const AttendRows&, int) { return sum; }
inline V score_of(PairSums sum, const SlotPanel& panel, const AttendRows& rows, int m) {
    return sum.to_floats() * (V::load(panel.key_scales) * V::set1(rows.q_step[m]));
}

inline const float* queries_of(const AttendRows& rows, float) { return rows.q; }
inline const int16_t* queries_of(const AttendRows& rows, int16_t) { return rows.q_int; }

// Scores of the panels whose keys are given, the first of them number `panel` of the span.
template <class A, int kRows, int kPanels>
[[gnu::noinline]] void score_block(const Span& span, const AttendRows& rows, int m0, int panel,
                                   const char* const (&keys)[kPanels], float* scores) {
    typename A::Sum sum[kRows][kPanels];
    clear(sum);
    const size_t lda = static_cast<size_t>(span.head_dim);
    contract<A>(keys, A::kBytes, span.head_dim / A::kDepth, queries_of(rows, typename A::Broadcast()) + m0 * lda, lda,
                sum);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p)
            score_of(sum[m][p], span.panels[panel + p], rows, m0 + m)
                .store(scores + static_cast<size_t>(m0 + m) * kSpan + (panel + p) * kPanel);
}

template <class A>
void score(const Span& span, const AttendRows& rows, const RowTiles& tiles, const Scratch& scratch) {
    if (tiles.count <= kConvertTiles) {
        for (int t = 0; t < tiles.count; ++t) {
            const RowTile& tile = tiles.tiles[t];
            with_constant<kTileRows>(tile.count, [&](auto count) {
                constexpr int kRows = decltype(count)::value;
                in_blocks<kMostPanels<kRows>>(tile.first, tile.last, [&](int panel, auto width) {
                    const char* keys[decltype(width)::value];
                    for (int p = 0; p < width; ++p) keys[p] = span.panels[panel + p].keys;
                    score_block<A, kRows>(span, rows, tile.m, panel, keys, scratch.scores);
                });
            });
        }
        return;
    }
    using Unpacked = typename A::Unpacked;
    const char* const keys[] = {scratch.unpacked};
    for (int panel = tiles.first; panel < tiles.last; ++panel) {
        for (int k = 0; k < span.head_dim / A::kDepth; ++k)
            A::unpack(span.panels[panel].keys + k * A::kBytes, scratch.unpacked + k * Unpacked::kBytes);
        for (int t = 0; t < tiles.count; ++t) {
            const RowTile& tile = tiles.tiles[t];
            if (panel < tile.first || panel >= tile.last) continue;
            with_constant<kTileRows>(tile.count, [&](auto count) {
                score_block<Unpacked, decltype(count)::value>(span, rows, tile.m, panel, keys, scratch.scores);
            });
        }
    }
}

// Where a row's partial result keeps what is not a sum over values.
inline float& highest_of(float* partial, int head_dim) { return partial[head_dim]; }
inline float& total_of(float* partial, int head_dim) { return partial[head_dim + 1]; }
inline float& weight_step_of(float* partial, int head_dim) { return partial[head_dim + 2]; }

inline V rounding() { return V::set1(12582912.0f); }  // 1.5 * 2^23 + x has x's nearest integer in its low bits

// Scores to softmax numerators, exactly 0 for slots that the row does not see, in panels first .. last - 1.
template <class A>
void soften(const Span& span, const AttendRows& rows, int m, int first, int last, const Scratch& scratch) {
    constexpr bool kIntegers = A::kDepth == 2;
    float* scores = scratch.scores + static_cast<size_t>(m) * kSpan;
    int16_t* weights = scratch.weights + static_cast<size_t>(m) * kSpan;
    float* partial = rows.partials + m * partial_floats(span.head_dim);
    const int begin = rows.begin[m], end = rows.end[m];
    const int own_first = begin / kPanel, own_last = (end + kPanel - 1) / kPanel;
    for (int i = own_first * kPanel; i < begin; ++i) scores[i] = kNoScore;
    for (int i = end; i < own_last * kPanel; ++i) scores[i] = kNoScore;

    V top = V::load(scores + own_first * kPanel);
    for (int panel = own_first + 1; panel < own_last; ++panel) top = max(top, V::load(scores + panel * kPanel));
    const float highest = highest_lane(top);
    highest_of(partial, span.head_dim) = highest;

    V total = V::zero(), largest = V::zero();
    for (int panel = own_first; panel < own_last; ++panel) {
        V weight = exp_negative(V::load(scores + panel * kPanel) - V::set1(highest));
        total = total + weight;
        if constexpr (kIntegers) {
            weight = weight * V::load(span.panels[panel].value_scales);
            largest = max(largest, weight);
        }
        weight.store(scores + panel * kPanel);
    }
    total_of(partial, span.head_dim) = sum_of_lanes(total);
    if constexpr (!kIntegers) {
        for (int i = first * kPanel; i < own_first * kPanel; ++i) scores[i] = 0;
        for (int i = own_last * kPanel; i < last * kPanel; ++i) scores[i] = 0;
    } else {
        const float most = highest_lane(largest);
        weight_step_of(partial, span.head_dim) = most / kWeightLimit;
        const V by = V::set1(most > 0 ? kWeightLimit / most : 0.0f);
        for (int i = first * kPanel; i < own_first * kPanel; ++i) weights[i] = 0;
        for (int panel = own_first; panel < own_last; ++panel)
            fma(V::load(scores + panel * kPanel), by, rounding()).store_low16(weights + panel * kPanel);
        for (int i = own_last * kPanel; i < last * kPanel; ++i) weights[i] = 0;
    }
}

inline const float* weights_of(const Scratch& scratch, float) { return scratch.scores; }
inline const int16_t* weights_of(const Scratch& scratch, int16_t) { return scratch.weights; }
inline V mixed(V sum, float) { return sum; }
inline V mixed(PairSums sum, float step) { return sum.to_floats() * V::set1(step); }

// Weighted sums of kPanels * 16 dimensions from `dim` on. values(panel): where those of a panel of slots are, for the
// first 16 dimensions; `apart` bytes to the next 16.
template <class A, int kRows, int kPanels, class Values>
[[gnu::noinline]] void mix_block(const Span& span, const AttendRows& rows, const RowTile& tile, int dim,
                                 const Values& values, size_t step_bytes, size_t apart, const Scratch& scratch) {
    typename A::Sum sum[kRows][kPanels];
    clear(sum);
    const auto* weights = weights_of(scratch, typename A::Broadcast()) + static_cast<size_t>(tile.m) * kSpan;
    for (int panel = tile.first; panel < tile.last; ++panel) {
        const char* at[kPanels];
        for (int p = 0; p < kPanels; ++p) at[p] = values(panel) + p * apart;
        contract<A>(at, step_bytes, kPanel / A::kDepth, weights + panel * kPanel, kSpan, sum);
    }
    const size_t ldp = partial_floats(span.head_dim);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
        float* partial = rows.partials + (tile.m + m) * ldp;
        const float step = weight_step_of(partial, span.head_dim);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) mixed(sum[m][p], step).store(partial + dim + p * kPanel);
    }
}

template <class A>
void mix(const Span& span, const AttendRows& rows, const RowTiles& tiles, const Scratch& scratch) {
    constexpr size_t kElement = A::kBytes / (A::kDepth * kPanel);
    const size_t step_bytes = span.value_slot * kElement, apart = span.value_panel * kElement;
    const int dims = span.head_dim / kPanel;
    if (tiles.count <= kConvertTiles) {
        for (int t = 0; t < tiles.count; ++t) {
            const RowTile& tile = tiles.tiles[t];
            with_constant<kTileRows>(tile.count, [&](auto count) {
                constexpr int kRows = decltype(count)::value;
                in_blocks<kMostPanels<kRows>>(0, dims, [&](int dim, auto width) {
                    auto values = [&](int panel) { return span.panels[panel].values + dim * apart; };
                    mix_block<A, kRows, decltype(width)::value>(span, rows, tile, dim * kPanel, values, step_bytes,
                                                                apart, scratch);
                });
            });
        }
        return;
    }
    using Unpacked = typename A::Unpacked;
    constexpr int kSteps = kPanel / A::kDepth;
    auto unpacked = [&](int panel) { return scratch.unpacked + panel * kSteps * Unpacked::kBytes; };
    for (int dim = 0; dim < dims; ++dim) {
        for (int panel = tiles.first; panel < tiles.last; ++panel)
            for (int k = 0; k < kSteps; ++k)
                A::unpack(span.panels[panel].values + dim * apart + k * step_bytes,
                          unpacked(panel) + k * Unpacked::kBytes);
        for (int t = 0; t < tiles.count; ++t)
            with_constant<kTileRows>(tiles.tiles[t].count, [&](auto count) {
                mix_block<Unpacked, decltype(count)::value, 1>(span, rows, tiles.tiles[t], dim * kPanel, unpacked,
                                                               Unpacked::kBytes, 0, scratch);
            });
    }
}

template <class A>
void attend_as(const Span& span, const AttendRows& rows) {
    const RowTiles tiles(rows);
    const Scratch scratch(rows.scratch, rows.count);
    score<A>(span, rows, tiles, scratch);
    for (int t = 0; t < tiles.count; ++t) {
        const RowTile& tile = tiles.tiles[t];
        for (int m = tile.m; m < tile.m + tile.count; ++m) soften<A>(span, rows, m, tile.first, tile.last, scratch);
    }
    mix<A>(span, rows, tiles, scratch);
}

void attend(const Span& span, const AttendRows& rows) {
    switch (span.dtype) {
        case TL_F16:
            return attend_as<Converting<TL_F16>>(span, rows);
        case kInt8:
            return attend_as<Widening>(span, rows);
        default:
            return attend_as<Converting<TL_F32>>(span, rows);
    }
}

// e^x is exactly 1 at 0, so the side with the higher score is not scaled.
void fold(const float* partial, int head_dim, float* sum) {
    const float higher = sum[head_dim] - partial[head_dim];
    const V down = exp_negative(V::set1(higher > 0 ? -higher : higher)), one = V::set1(1.0f);
    const V old = higher > 0 ? one : down, fresh = higher > 0 ? down : one;
    if (!(higher > 0)) sum[head_dim] = partial[head_dim];
    float lanes[kPanel];
    fma(V::set1(partial[head_dim + 1]), fresh, V::set1(sum[head_dim + 1]) * old).store(lanes);
    sum[head_dim + 1] = lanes[0];
    for (int k = 0; k < head_dim; k += kPanel) fma(V::load(partial + k), fresh, V::load(sum + k) * old).store(sum + k);
}

void finish_attention(const float* sum, int head_dim, float* out) {
    const V by = V::set1(1.0f / sum[head_dim + 1]);
    for (int k = 0; k < head_dim; k += kPanel) (V::load(sum + k) * by).store(out + k);
}

float largest_magnitude(const float* x, int n) {
    V most = V::zero();
    for (int i = 0; i < n; i += kPanel) {
        const V v = V::load(x + i);
        most = max(max(v, V::zero() - v), most);
    }
    const float largest = highest_lane(most);
    return largest < 3e38f ? largest : 3e38f;
}

void round_queries(const float* q, int n, int16_t* out, float* step) {
    const float largest = largest_magnitude(q, n);
    *step = largest / kQueryLimit;
    const V by = V::set1(largest > 0 ? kQueryLimit / largest : 0.0f);
    for (int i = 0; i < n; i += kPanel) fma(V::load(q + i), by, rounding()).store_low16(out + i);
}

float store_int8(const float* x, int n, int8_t* out) {
    const float largest = largest_magnitude(x, n);
    const V by = V::set1(largest > 0 ? 127.0f / largest : 0.0f);
    for (int i = 0; i < n; i += kPanel) fma(V::load(x + i), by, rounding()).store_low8(out + i);
    return largest / 127.0f;
}
