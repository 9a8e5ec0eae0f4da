#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace tinyloop::cpu;

namespace {

constexpr int kScoreRows = 32;  // (row, query head) pairs that one attention task handles
constexpr int kHeadRows = 32;   // rows of logits computed at a time

struct Share {
    int begin, end;
};

Share share(int count, int id, int threads) {
    return {static_cast<int>(int64_t(count) * id / threads), static_cast<int>(int64_t(count) * (id + 1) / threads)};
}

const Kernels* level_of(const char* name) {
    const bool any = std::strcmp(name, "auto") == 0;
    for (const Kernels* k : {avx512_kernels(), avx2_kernels(), portable_kernels()})
        if (k && (any || std::strcmp(name, k->name) == 0)) return k;
    return nullptr;
}

// Another library in the process may have switched subnormals off for the calling thread; the bits must not follow.
class StandardFloatMode {
  public:
#if defined(__x86_64__)
    StandardFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~StandardFloatMode() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#endif
};

}  // namespace

// ---------------------------------------------------------------- cache and states

tl_cache::tl_cache(const tl_model_desc& desc, const tl_cache_desc& shape)
    : positions(pad16(shape.positions)),
      head_dim(pad16(desc.head_dim)),
      n_kv_heads(desc.n_kv_heads),
      loops(shape.loops),
      storage(bytes(desc, shape)) {}

uint64_t tl_cache::bytes(const tl_model_desc& desc, const tl_cache_desc& shape) {
    const uint64_t slots = uint64_t(desc.n_prelude) + desc.n_coda + uint64_t(shape.loops) * desc.n_core;
    return slots * desc.n_kv_heads * pad16(shape.positions) * pad16(desc.head_dim) * 2 * sizeof(uint16_t);
}

uint16_t* tl_cache::keys(int slot, int kv_head) const {
    const size_t block = static_cast<size_t>(positions) * head_dim;
    return storage.as<uint16_t>() + (static_cast<size_t>(slot) * n_kv_heads + kv_head) * 2 * block;
}

uint16_t* tl_cache::values(int slot, int kv_head) const {
    return keys(slot, kv_head) + static_cast<size_t>(positions) * head_dim;
}

tl_states::tl_states(int count_, int stride_)
    : count(count_),
      stride(stride_),
      core(static_cast<size_t>(count_) * stride_ * 4),
      prelude(static_cast<size_t>(count_) * stride_ * 4) {}

// ---------------------------------------------------------------- model

tl_model::tl_model(const tl_model_desc& d, const tl_options& options)
    : desc(d),
      kernels(level_of(options.simd)),
      pool_(options.threads),
      weights_(d, pool_),
      max_rows_(options.max_rows),
      ldx_(pad16(d.d_model)),
      head_dim_(pad16(d.head_dim)),
      ldq_((d.n_heads + 2 * d.n_kv_heads) * head_dim_),
      lda_(d.n_heads * head_dim_),
      ldf_(pad16(d.d_ffn)) {
    auto floats = [&](size_t stride) { return Buffer(static_cast<size_t>(max_rows_) * stride * sizeof(float)); };
    x_ = floats(ldx_);
    e_ = floats(ldx_);
    normed_ = floats(ldx_);
    pair_ = d.injection == TL_INJECT_CONCAT ? floats(2 * d.d_model) : Buffer();
    qkv_ = floats(ldq_);
    attended_ = floats(lda_);
    gate_ = floats(ldf_);
    up_ = floats(ldf_);
    out_ = floats(ldx_);
    angles_ = floats(d.head_dim);
    logits_ = Buffer(sizeof(float) * kHeadRows * weights_.head_matrix().outputs());
    const int most_rows = std::max({max_rows_, kHeadRows, d.n_heads / d.n_kv_heads});
    for (int i = 0; i < options.threads; ++i) scratch_.emplace_back(sizeof(float) * kPanel * (256 + most_rows));
    scores_.resize(options.threads);
}

uint64_t tl_model::bytes() const {
    uint64_t total = weights_.bytes();
    for (const Buffer* b : {&x_, &e_, &normed_, &pair_, &qkv_, &attended_, &gate_, &up_, &out_, &angles_, &logits_})
        total += b->bytes();
    for (const Buffer& b : scratch_) total += b.bytes();
    for (const Buffer& b : scores_) total += b.bytes();
    return total;
}

void tl_model::forward(tl_cache* const* caches, tl_states* states, const tl_row* rows, int n_rows, float* logits) {
    const StandardFloatMode mode;
    Call call{caches, states, rows, n_rows, logits, {}, {}, {}, {}};
    int steps_needed = 0;
    size_t longest = 0;
    for (int i = 0; i < n_rows; ++i) {
        steps_needed = std::max(steps_needed, rows[i].loop_end - rows[i].loop_begin);
        longest = std::max<size_t>(longest, caches[rows[i].cache]->positions);
    }
    call.fresh = plan(call, 0, [](const tl_row& r, int) { return r.loop_begin == 0; });
    for (int step = 0; step < steps_needed; ++step)
        call.core.push_back(plan(call, step, [](const tl_row& r, int s) { return r.loop_begin + s < r.loop_end; }));
    call.coda = plan(call, 0, [](const tl_row& r, int) { return (r.flags & (TL_ROW_CODA | TL_ROW_LOGITS)) != 0; });
    call.head = plan(call, 0, [](const tl_row& r, int) { return (r.flags & TL_ROW_LOGITS) != 0; });
    const size_t score_bytes = sizeof(float) * std::max(kScoreRows, desc.n_heads / desc.n_kv_heads) * longest;
    for (Buffer& b : scores_)
        if (b.bytes() < score_bytes) b = Buffer(score_bytes);
    pool_.run([&](int id) { work(call, id); });
}

tl_model::Plan tl_model::plan(const Call& call, int step, bool (*wanted)(const tl_row&, int)) const {
    const int most = std::max(1, kScoreRows / (desc.n_heads / desc.n_kv_heads));
    Plan out;
    for (int i = 0; i < call.n_rows; ++i) {
        const tl_row& row = call.rows[i];
        if (!wanted(row, step)) continue;
        const int loop = row.loop_begin + step;
        const int at = static_cast<int>(out.rows.size());
        const bool joins = at > 0 && call.rows[out.rows.back()].cache == row.cache && out.loops.back() == loop &&
                           out.groups.back().count < most;
        if (joins)
            ++out.groups.back().count;
        else
            out.groups.push_back({at, 1});
        out.rows.push_back(i);
        out.loops.push_back(loop);
    }
    return out;
}

void tl_model::work(const Call& call, int id) {
    embed(call, id);
    for (int i = 0; i < desc.n_prelude && !call.fresh.rows.empty(); ++i) layer(call, call.fresh, i, i, 0, id);
    begin_core(call, id);
    for (const Plan& plan : call.core) {
        inject(plan, id);
        for (int i = 0; i < desc.n_core; ++i)
            layer(call, plan, desc.n_prelude + i, desc.n_prelude + desc.n_coda + i, desc.n_core, id);
        norm_in_place(plan, weights_.loop_norm, id);
    }
    save_states(call, id);
    if (call.coda.rows.empty()) return;
    norm_in_place(call.coda, weights_.core_norm, id);
    for (int i = 0; i < desc.n_coda; ++i)
        layer(call, call.coda, desc.n_prelude + desc.n_core + i, desc.n_prelude + i, 0, id);
    head(call, id);
}

void tl_model::embed(const Call& call, int id) {
    const auto [begin, end] = share(call.n_rows, id, pool_.threads());
    for (int i = begin; i < end; ++i) {
        const tl_row& row = call.rows[i];
        float* x = x_.as<float>() + static_cast<size_t>(i) * ldx_;
        float* e = e_.as<float>() + static_cast<size_t>(i) * ldx_;
        if (row.loop_begin > 0) {
            std::memcpy(x, call.states->core.as<float>() + static_cast<size_t>(row.state) * ldx_, sizeof(float) * ldx_);
            std::memcpy(e, call.states->prelude.as<float>() + static_cast<size_t>(row.state) * ldx_,
                        sizeof(float) * ldx_);
        } else {
            for (int k = 0; k < desc.d_model; ++k) x[k] = weights_.embed.at(row.token, k) * desc.embed_scale;
        }
        float* angle = angles_.as<float>() + static_cast<size_t>(i) * desc.head_dim;
        for (int k = 0; k < desc.head_dim / 2; ++k) {
            const double turn = row.position * std::pow(double(desc.rope_theta), -2.0 * k / desc.head_dim);
            angle[2 * k] = static_cast<float>(std::cos(turn));
            angle[2 * k + 1] = static_cast<float>(std::sin(turn));
        }
    }
    pool_.barrier();
}

void tl_model::begin_core(const Call& call, int id) {
    const auto [begin, end] = share(static_cast<int>(call.fresh.rows.size()), id, pool_.threads());
    for (int m = begin; m < end; ++m) {
        const size_t at = static_cast<size_t>(call.fresh.rows[m]) * ldx_;
        std::memcpy(e_.as<float>() + at, x_.as<float>() + at, sizeof(float) * ldx_);
        if (desc.start == TL_START_ZEROS) std::memset(x_.as<float>() + at, 0, sizeof(float) * ldx_);
    }
    pool_.barrier();
}

void tl_model::inject(const Plan& plan, int id) {
    if (desc.injection == TL_INJECT_NONE) return;
    const int d = desc.d_model;
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()), id, pool_.threads());
    for (int m = begin; m < end; ++m) {
        float* x = x_.as<float>() + static_cast<size_t>(plan.rows[m]) * ldx_;
        const float* e = e_.as<float>() + static_cast<size_t>(plan.rows[m]) * ldx_;
        if (desc.injection == TL_INJECT_ADD) {
            kernels->add(e, d, x);
        } else {
            float* pair = pair_.as<float>() + static_cast<size_t>(m) * 2 * d;
            std::memcpy(pair, x, sizeof(float) * d);
            std::memcpy(pair + d, e, sizeof(float) * d);
            std::memset(x, 0, sizeof(float) * ldx_);
        }
    }
    pool_.barrier();
    if (desc.injection == TL_INJECT_CONCAT)
        project(weights_.inject, pair_.as<float>(), 2 * d, plan, nullptr, 0, true, id);
}

// ---------------------------------------------------------------- one layer

void tl_model::layer(const Call& call, const Plan& plan, int index, int slot, int slot_per_loop, int id) {
    const LayerWeights& w = weights_.layers[index];
    const bool plain = desc.norm == TL_NORM_PRE;
    if (id == 0) steps.fetch_add(1, std::memory_order_relaxed);

    normed_input(plan, w.attn_norm, id);
    project(w.qkv, normed_.as<float>(), ldx_, plan, qkv_.as<float>(), ldq_, false, id);
    position_and_append(call, plan, w, slot, slot_per_loop, id);
    attention(call, plan, slot, slot_per_loop, id);
    project(w.wo, attended_.as<float>(), lda_, plan, out_.as<float>(), ldx_, plain, id);
    residual(plan, w.attn_post_norm, id);

    normed_input(plan, w.ffn_norm, id);
    const int n = static_cast<int>(plan.rows.size());
    const auto [begin, end] = share(w.w_gate.panels(), id, pool_.threads());
    float* scratch = scratch_[id].as<float>();
    kernels->product(w.w_gate.view(), normed_.as<float>(), ldx_, n, gate_.as<float>(), ldf_, nullptr, false, begin, end,
                     scratch);
    kernels->product(w.w_up.view(), normed_.as<float>(), ldx_, n, up_.as<float>(), ldf_, nullptr, false, begin, end,
                     scratch);
    for (int m = 0; m < n && begin < end; ++m) {
        const size_t at = static_cast<size_t>(m) * ldf_ + begin * kPanel;
        kernels->swiglu(gate_.as<float>() + at, up_.as<float>() + at, (end - begin) * kPanel);
    }
    pool_.barrier();
    project(w.w_down, gate_.as<float>(), ldf_, plan, out_.as<float>(), ldx_, plain, id);
    residual(plan, w.ffn_post_norm, id);
}

// normed[m] = norm(x[row m]), or x itself where the placement has no norm before.
void tl_model::normed_input(const Plan& plan, const Vector& norm, int id) {
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()), id, pool_.threads());
    for (int m = begin; m < end; ++m) {
        const float* x = x_.as<float>() + static_cast<size_t>(plan.rows[m]) * ldx_;
        float* y = normed_.as<float>() + static_cast<size_t>(m) * ldx_;
        if (norm.empty())
            std::memcpy(y, x, sizeof(float) * ldx_);
        else
            kernels->rmsnorm(x, norm.data(), desc.norm_eps, desc.d_model, y);
    }
    pool_.barrier();
}

// c[m] = w a[m], or x[row m] += w a[m].
void tl_model::project(const Matrix& w, const float* a, int lda, const Plan& plan, float* c, int ldc, bool to_x,
                       int id) {
    const auto [begin, end] = share(w.panels(), id, pool_.threads());
    const int n = static_cast<int>(plan.rows.size());
    if (begin < end) {
        float* scratch = scratch_[id].as<float>();
        if (to_x)
            kernels->product(w.view(), a, lda, n, x_.as<float>(), ldx_, plan.rows.data(), true, begin, end, scratch);
        else
            kernels->product(w.view(), a, lda, n, c, ldc, nullptr, false, begin, end, scratch);
    }
    pool_.barrier();
}

// Adds the block's output to x, with the norm after it where the placement has one. "pre" has added it already.
void tl_model::residual(const Plan& plan, const Vector& post_norm, int id) {
    if (desc.norm == TL_NORM_PRE) return;
    const int d = desc.d_model;
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()), id, pool_.threads());
    for (int m = begin; m < end; ++m) {
        float* x = x_.as<float>() + static_cast<size_t>(plan.rows[m]) * ldx_;
        float* out = out_.as<float>() + static_cast<size_t>(m) * ldx_;
        if (desc.norm == TL_NORM_SANDWICH) {
            kernels->rmsnorm(out, post_norm.data(), desc.norm_eps, d, out);
            kernels->add(out, d, x);
        } else {
            kernels->add(out, d, x);
            kernels->rmsnorm(x, post_norm.data(), desc.norm_eps, d, x);
        }
    }
    pool_.barrier();
}

void tl_model::norm_in_place(const Plan& plan, const Vector& weight, int id) {
    if (weight.empty()) return;
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()), id, pool_.threads());
    for (int m = begin; m < end; ++m) {
        float* x = x_.as<float>() + static_cast<size_t>(plan.rows[m]) * ldx_;
        kernels->rmsnorm(x, weight.data(), desc.norm_eps, desc.d_model, x);
    }
    pool_.barrier();
}

// ---------------------------------------------------------------- attention

// Rotary position embedding (Su et al., arXiv 2104.09864); angles: (head_dim / 2) pairs of cos, sin.
void tl_model::rotate(float* head, const float* angles) const {
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

void tl_model::position_and_append(const Call& call, const Plan& plan, const LayerWeights& w, int slot,
                                   int slot_per_loop, int id) {
    const int heads = desc.n_heads, kv = desc.n_kv_heads, hd = desc.head_dim;
    const int per_row = heads + 2 * kv;
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()) * per_row, id, pool_.threads());
    for (int task = begin; task < end; ++task) {
        const int m = task / per_row, part = task % per_row;
        const tl_row& row = call.rows[plan.rows[m]];
        float* head = qkv_.as<float>() + static_cast<size_t>(m) * ldq_ + static_cast<size_t>(part) * head_dim_;
        const bool is_query = part < heads, is_value = part >= heads + kv;
        const int number = is_query ? part : is_value ? part - heads - kv : part - heads;
        const Vector& bias = is_query ? w.q_bias : is_value ? w.v_bias : w.k_bias;
        if (!bias.empty()) kernels->add(bias.data() + static_cast<size_t>(number) * head_dim_, hd, head);
        if (!is_value) {
            const Vector& norm = is_query ? w.q_norm : w.k_norm;
            if (!norm.empty()) kernels->rmsnorm(head, norm.data(), desc.norm_eps, hd, head);
            rotate(head, angles_.as<float>() + static_cast<size_t>(plan.rows[m]) * hd);
        }
        if (is_query) continue;
        tl_cache& cache = *call.caches[row.cache];
        const int at = slot + plan.loops[m] * slot_per_loop, p = row.position;
        if (is_value) {
            uint16_t* to = cache.values(at, number) + static_cast<size_t>(p) * kPanel;
            for (int k = 0; k < head_dim_; k += kPanel)
                kernels->store_fp16(head + k, kPanel, to + static_cast<size_t>(k) * cache.positions, 1);
        } else {
            uint16_t* to = cache.keys(at, number) + static_cast<size_t>(p / kPanel) * head_dim_ * kPanel + p % kPanel;
            kernels->store_fp16(head, head_dim_, to, kPanel);
        }
    }
    if (id == 0) pool_.reset_next();
    pool_.barrier();
}

void tl_model::attention(const Call& call, const Plan& plan, int slot, int slot_per_loop, int id) {
    const int tasks = static_cast<int>(plan.groups.size()) * desc.n_kv_heads;
    for (int task = pool_.next(); task < tasks; task = pool_.next()) {
        const Group& group = plan.groups[task / desc.n_kv_heads];
        attend(call, plan, group, slot + plan.loops[group.begin] * slot_per_loop, task % desc.n_kv_heads, id);
    }
    pool_.barrier();
}

// Softmax attention of one group's rows for the query heads that share a key head. Rows see positions 0 .. their own.
void tl_model::attend(const Call& call, const Plan& plan, const Group& group, int slot, int kv_head, int id) {
    const tl_cache& cache = *call.caches[call.rows[plan.rows[group.begin]].cache];
    const int queries = desc.n_heads / desc.n_kv_heads;
    int seen = 0;  // positions that any row of the group sees
    for (int r = 0; r < group.count; ++r) seen = std::max(seen, call.rows[plan.rows[group.begin + r]].position + 1);
    const int padded = pad16(seen);
    const Panels keys{cache.keys(slot, kv_head), TL_F16, head_dim_, static_cast<size_t>(head_dim_) * kPanel};
    const Panels values{cache.values(slot, kv_head), TL_F16, seen, static_cast<size_t>(cache.positions) * kPanel};
    const float* q =
        qkv_.as<float>() + static_cast<size_t>(group.begin) * ldq_ + static_cast<size_t>(kv_head) * queries * head_dim_;
    float* out = attended_.as<float>() + static_cast<size_t>(group.begin) * lda_ +
                 static_cast<size_t>(kv_head) * queries * head_dim_;
    float* scores = scores_[id].as<float>();
    float* scratch = scratch_[id].as<float>();
    const float factor = 1.0f / std::sqrt(static_cast<float>(desc.head_dim));

    // One row: its heads are the rows of the product. More rows: one product per head. The bits are the same.
    const bool by_head = group.count == 1;
    const int products = by_head ? 1 : queries, rows = by_head ? queries : group.count;
    for (int h = 0; h < products; ++h) {
        kernels->product(keys, q + h * head_dim_, by_head ? head_dim_ : ldq_, rows, scores, padded, nullptr, false, 0,
                         padded / kPanel, scratch);
        float* to = out + h * head_dim_;
        const int ldo = by_head ? head_dim_ : lda_;
        float sums[1024];
        for (int m = 0; m < rows; ++m) {
            const int row = plan.rows[group.begin + (by_head ? 0 : m)];
            sums[m] =
                kernels->softmax(scores + static_cast<size_t>(m) * padded, call.rows[row].position + 1, padded, factor);
        }
        kernels->product(values, scores, padded, rows, to, ldo, nullptr, false, 0, head_dim_ / kPanel, scratch);
        for (int m = 0; m < rows; ++m) kernels->scale(to + static_cast<size_t>(m) * ldo, head_dim_, 1.0f / sums[m]);
    }
}

// ---------------------------------------------------------------- the ends

void tl_model::save_states(const Call& call, int id) {
    const auto [begin, end] = share(call.n_rows, id, pool_.threads());
    for (int i = begin; i < end; ++i) {
        const int state = call.rows[i].state;
        if (state < 0) continue;
        std::memcpy(call.states->core.as<float>() + static_cast<size_t>(state) * ldx_,
                    x_.as<float>() + static_cast<size_t>(i) * ldx_, sizeof(float) * ldx_);
        std::memcpy(call.states->prelude.as<float>() + static_cast<size_t>(state) * ldx_,
                    e_.as<float>() + static_cast<size_t>(i) * ldx_, sizeof(float) * ldx_);
    }
    pool_.barrier();
}

void tl_model::head(const Call& call, int id) {
    const Matrix& matrix = weights_.head_matrix();
    const int total = static_cast<int>(call.head.rows.size()), ldl = matrix.outputs(), vocab = desc.vocab_size;
    for (int first = 0; first < total; first += kHeadRows) {
        const int n = std::min(kHeadRows, total - first);
        Plan rows;
        const auto [begin, end] = share(n, id, pool_.threads());
        for (int m = begin; m < end; ++m) {
            const float* x = x_.as<float>() + static_cast<size_t>(call.head.rows[first + m]) * ldx_;
            float* y = normed_.as<float>() + static_cast<size_t>(m) * ldx_;
            if (weights_.final_norm.empty())
                std::memcpy(y, x, sizeof(float) * ldx_);
            else
                kernels->rmsnorm(x, weights_.final_norm.data(), desc.norm_eps, desc.d_model, y);
        }
        pool_.barrier();
        const auto [p0, p1] = share(matrix.panels(), id, pool_.threads());
        if (p0 < p1)
            kernels->product(matrix.view(), normed_.as<float>(), ldx_, n, logits_.as<float>(), ldl, nullptr, false, p0,
                             p1, scratch_[id].as<float>());
        pool_.barrier();
        for (int m = begin; m < end; ++m) {
            const float* from = logits_.as<float>() + static_cast<size_t>(m) * ldl;
            float* to = call.logits + static_cast<size_t>(first + m) * vocab;
            for (int v = 0; v < vocab; ++v) to[v] = from[v] * desc.logit_scale;
        }
        pool_.barrier();
    }
}
