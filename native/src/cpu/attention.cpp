// Softmax attention over a cache, for the rows of one group and one key head at a time.
//
// A row reads exactly what the cache stores, its own slot included. Scores, weights and sums are ordered by slot, in
// blocks of 16 slots counted from slot 0 of the sequence, so the bits do not depend on the group, the ring's size or
// where it wraps; a slot that a row does not see adds exact zeros.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "forward.h"

using namespace tinyloop::cpu;

// The slots [low, high) that a group's rows may see, low a multiple of 16, as one or two runs of the cache's memory.
struct tl_model::Window {
    struct Run {
        int slot, at, count;  // `count` slots from `slot` on lie at `at`
    };

    Window(const tl_cache& cache, int first_seen, int last_seen)
        : low(first_seen / kPanel * kPanel), high(last_seen + 1), width(pad16(high - low)) {
        const int at = cache.at(low);
        runs[0] = {low, at, std::min(high - low, cache.capacity - at)};
        if (runs[0].count < high - low) runs[1] = {low + runs[0].count, 0, high - low - runs[0].count};
    }

    const int low, high, width;  // width: of a row of scores
    Run runs[2] = {};
};

void tl_model::reserve_attention(const Call& call) {
    size_t longest = 0;
    int positions = 0;
    bool inputs = false;
    for (int i = 0; i < call.n_rows; ++i) {
        const tl_cache& cache = *call.caches[call.rows[i].cache];
        longest = std::max(longest, static_cast<size_t>(cache.capacity) + kPanel);
        positions = std::max(positions, call.rows[i].position + 1);
        inputs = inputs || cache.holds_inputs();
    }
    const int known = static_cast<int>(angles_.size()) / desc.head_dim;
    if (positions > known) {
        angles_.resize(static_cast<size_t>(positions) * desc.head_dim);
        for (int p = known; p < positions; ++p)
            for (int k = 0; k < desc.head_dim / 2; ++k) {
                const double turn = p * std::pow(double(desc.rope_theta), -2.0 * k / desc.head_dim);
                angles_[static_cast<size_t>(p) * desc.head_dim + 2 * k] = static_cast<float>(std::cos(turn));
                angles_[static_cast<size_t>(p) * desc.head_dim + 2 * k + 1] = static_cast<float>(std::sin(turn));
            }
    }
    const size_t score_bytes =
        sizeof(float) * static_cast<size_t>(std::max(kScoreRows, desc.n_heads / desc.n_kv_heads)) * longest;
    const size_t projected_bytes =
        inputs ? sizeof(float) *
                     (2 * longest * head_dim_ + kPanel * static_cast<size_t>(pad32(desc.d_model) + 2 * head_dim_))
               : 0;
    for (Buffer& b : scores_)
        if (b.bytes() < score_bytes) b = Buffer(score_bytes);
    for (Buffer& b : projected_)
        if (b.bytes() < projected_bytes) b = Buffer(projected_bytes);
}

// Rotary position embedding (Su et al., arXiv 2104.09864).
void tl_model::rotate(float* head, int position) const {
    const float* angles = angles_.data() + static_cast<size_t>(position) * desc.head_dim;
    const int half = desc.head_dim / 2;
    const int step = desc.rope == TL_ROPE_HALF ? 1 : 2, apart = desc.rope == TL_ROPE_HALF ? half : 1;
    for (int k = 0; k < half; ++k) {
        const float c = angles[2 * k], s = angles[2 * k + 1];
        float& a = head[k * step];
        float& b = head[k * step + apart];
        const float turned = a * c - b * s;
        b = b * c + a * s;
        a = turned;
    }
}

void tl_model::attention(const Call& call, const Plan& plan, const LayerWeights& w, Visits visits, int id) {
    const int tasks = static_cast<int>(plan.groups.size()) * desc.n_kv_heads;
    for (int task = pool_.next(); task < tasks; task = pool_.next()) {
        const Group& group = plan.groups[task / desc.n_kv_heads];
        attend(call, plan, group, w, visits.at(plan.loops[group.begin]), task % desc.n_kv_heads, id);
    }
    pool_.barrier();
}

namespace {

// The last slot a row sees: its highest tree bit.
int last_seen(const tl_row& row) { return row.base + 63 - __builtin_clzll(row.tree); }

}  // namespace

void tl_model::attend(const Call& call, const Plan& plan, const Group& group, const LayerWeights& w, int visit,
                      int kv_head, int id) {
    const tl_cache& cache = *call.caches[call.rows[plan.rows[group.begin]].cache];
    const int queries = desc.n_heads / desc.n_kv_heads;
    auto row_of = [&](int m) -> const tl_row& { return call.rows[plan.rows[group.begin + m]]; };
    int first = cache.first_seen(row_of(0).slot), last = 0;
    for (int m = 0; m < group.count; ++m) {
        first = std::min(first, cache.first_seen(row_of(m).slot));
        last = std::max(last, last_seen(row_of(m)));
    }
    const Window window(cache, first, last);
    const bool inputs = cache.holds_inputs();
    if (inputs) project_inputs(cache, window, w, visit, kv_head, id);

    const int dtype = inputs ? static_cast<int>(TL_F32) : cache.quantized() ? kInt8 : static_cast<int>(TL_F16);
    const size_t size = inputs ? 4 : cache.quantized() ? 1 : 2;
    const char* keys = inputs ? projected_[id].as<char>() : cache.keys(visit, kv_head);
    const char* values =
        inputs ? keys + sizeof(float) * static_cast<size_t>(window.width) * head_dim_ : cache.values(visit, kv_head);
    const size_t value_stride = static_cast<size_t>(inputs ? window.width : cache.capacity) * kPanel;
    const float* q =
        qkv_.as<float>() + static_cast<size_t>(group.begin) * ldq_ + static_cast<size_t>(kv_head) * queries * head_dim_;
    float* out = attended_.as<float>() + static_cast<size_t>(group.begin) * lda_ +
                 static_cast<size_t>(kv_head) * queries * head_dim_;
    float* scores = scores_[id].as<float>();
    float* scratch = scratch_[id].as<float>();

    // One row: its heads are the rows of the product. More rows: one product per head. The bits are the same.
    const bool by_head = group.count == 1;
    const int products = by_head ? 1 : queries, rows = by_head ? queries : group.count;
    const int ldq = by_head ? head_dim_ : ldq_, ldo = by_head ? head_dim_ : lda_;
    for (int h = 0; h < products; ++h) {
        for (const Window::Run& run : window.runs) {
            if (!run.count) continue;
            const size_t at = static_cast<size_t>(inputs ? run.slot - window.low : run.at);
            const Panels panels{keys + at * head_dim_ * size, dtype, head_dim_,
                                static_cast<size_t>(head_dim_) * kPanel};
            kernels->product(panels, {q + h * head_dim_, ldq}, rows, scores + (run.slot - window.low), window.width,
                             nullptr, Put::store, 0, (run.count + kPanel - 1) / kPanel, scratch);
        }
        float* to = out + h * head_dim_;
        float sums[1024];
        for (int m = 0; m < rows; ++m)
            sums[m] = soften(cache, window, row_of(by_head ? 0 : m), visit, kv_head,
                             scores + static_cast<size_t>(m) * window.width);
        Put put = Put::store;
        for (const Window::Run& run : window.runs) {
            if (!run.count) continue;
            const size_t at = static_cast<size_t>(inputs ? run.slot - window.low : run.at);
            const Panels panels{values + at * kPanel * size, dtype, run.count, value_stride};
            kernels->product(panels, {scores + (run.slot - window.low), window.width}, rows, to, ldo, nullptr, put, 0,
                             head_dim_ / kPanel, scratch);
            put = Put::go_on;
        }
        for (int m = 0; m < rows; ++m) kernels->scale(to + static_cast<size_t>(m) * ldo, head_dim_, 1.0f / sums[m]);
    }
}

// Turns a row's products into softmax numerators over the slots it sees, 0 elsewhere; returns their sum.
float tl_model::soften(const tl_cache& cache, const Window& window, const tl_row& row, int visit, int kv_head,
                       float* scores) const {
    const float factor = 1.0f / std::sqrt(static_cast<float>(desc.head_dim));
    auto scale_by = [&](const float* scales) {
        for (const Window::Run& run : window.runs)
            for (int i = 0; i < run.count; ++i) scores[run.slot - window.low + i] *= scales[run.at + i];
    };
    if (cache.quantized()) scale_by(cache.key_scales(visit, kv_head));
    const int begin = cache.first_seen(row.slot) - window.low, base = row.base - window.low;
    const int seen = __builtin_popcountll(row.tree);
    const bool gaps = row.tree & (row.tree + 1);
    if (gaps)  // a tree row: its ancestors' scores take the places they would have in a plain sequence
        for (int bit = 0, i = 0; bit < 64; ++bit)
            if (row.tree >> bit & 1) scores[base + i++] = scores[base + bit];
    const float sum = kernels->softmax(scores, begin, base + seen, window.width, factor);
    if (gaps) {
        float weights[64];
        std::copy(scores + base, scores + base + seen, weights);
        std::fill(scores + base, scores + base + seen, 0.0f);
        for (int bit = 0, i = 0; bit < 64; ++bit)
            if (row.tree >> bit & 1) scores[base + bit] = weights[i++];
    }
    if (cache.quantized()) scale_by(cache.value_scales(visit, kv_head));
    return sum;
}

// Keys and values of one head for the window's slots, projected from the stored inputs into this thread's buffer: keys
// in panels of 16 slots, then values in panels of 16 dimensions, as floats.
void tl_model::project_inputs(const tl_cache& cache, const Window& window, const LayerWeights& w, int visit,
                              int kv_head, int id) {
    const int d = desc.d_model, hd = desc.head_dim, ldi = pad32(d);
    float* keys = projected_[id].as<float>();
    float* values = keys + static_cast<size_t>(window.width) * head_dim_;
    float* inputs = values + static_cast<size_t>(window.width) * head_dim_;  // (16, ldi)
    float* heads = inputs + static_cast<size_t>(kPanel) * ldi;               // (16, key head_dim + value head_dim)
    const Stored kind = cache.mode == TL_CACHE_H_FP16   ? Stored::fp16
                        : cache.mode == TL_CACHE_H_INT8 ? Stored::int8
                                                        : Stored::int4;
    const int panels = head_dim_ / kPanel, first_key = (desc.n_heads + kv_head) * panels,
              first_value = (desc.n_heads + desc.n_kv_heads + kv_head) * panels;
    const Panels all = w.qkv.view();
    for (int slot = window.low; slot < window.high; slot += kPanel) {
        const int count = std::min(kPanel, window.high - slot), column = slot - window.low;
        for (int i = 0; i < count; ++i) {
            float* input = inputs + static_cast<size_t>(i) * ldi;
            restore(kind, cache.input(visit, slot + i), d, input);
            std::fill(input + d, input + ldi, 0.0f);  // keys of a longer window may have been here
            if (integers_) stored_rows_[id].set(i, input, d, *kernels);
        }
        const Activations rows = integers_ ? stored_rows_[id].with(inputs, ldi) : Activations{inputs, ldi};
        const int ldh = 2 * head_dim_;
        kernels->product(all, rows, count, heads - first_key * kPanel, ldh, nullptr, Put::store, first_key,
                         first_key + panels, scratch_[id].as<float>());
        kernels->product(all, rows, count, heads + head_dim_ - first_value * kPanel, ldh, nullptr, Put::store,
                         first_value, first_value + panels, scratch_[id].as<float>());
        for (int i = 0; i < count; ++i) {
            float* key = heads + static_cast<size_t>(i) * ldh;
            float* value = key + head_dim_;
            if (!w.k_bias.empty()) kernels->add(w.k_bias.data() + static_cast<size_t>(kv_head) * head_dim_, hd, key);
            if (!w.v_bias.empty()) kernels->add(w.v_bias.data() + static_cast<size_t>(kv_head) * head_dim_, hd, value);
            if (!w.k_norm.empty()) kernels->rmsnorm(key, w.k_norm.data(), desc.norm_eps, hd, key);
            rotate(key, cache.position(slot + i));
            for (int k = 0; k < head_dim_; ++k) {
                keys[(static_cast<size_t>(column) / kPanel * head_dim_ + k) * kPanel + i] = key[k];
                values[static_cast<size_t>(k / kPanel) * window.width * kPanel +
                       static_cast<size_t>(column + i) * kPanel + k % kPanel] = value[k];
            }
        }
    }
}
