#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace tinyloop::cpu;

namespace {

constexpr int kHeadRows = 32;  // rows of logits computed at a time

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
    before_ = floats(ldx_);
    logits_ = Buffer(sizeof(float) * kHeadRows * weights_.head_matrix().outputs());
    const int most_rows = std::max({max_rows_, kHeadRows, d.n_heads / d.n_kv_heads});
    for (int i = 0; i < options.threads; ++i) scratch_.emplace_back(sizeof(float) * kPanel * (256 + most_rows));
    scores_.resize(options.threads);
    projected_.resize(options.threads);
}

uint64_t tl_model::bytes() const {
    uint64_t total = weights_.bytes();
    for (const Buffer* b : {&x_, &e_, &before_, &normed_, &pair_, &qkv_, &attended_, &gate_, &up_, &out_, &logits_})
        total += b->bytes();
    for (const Buffer& b : scratch_) total += b.bytes();
    for (const auto* buffers : {&scores_, &projected_})
        for (const Buffer& b : *buffers) total += b.bytes();
    return total;
}

void tl_model::forward(tl_cache* const* caches, tl_states* states, const tl_row* rows, int n_rows, float* logits,
                       int32_t* loops_run) {
    const StandardFloatMode mode;
    Call call{};
    call.caches = caches;
    call.states = states;
    call.rows = rows;
    call.n_rows = n_rows;
    call.logits = logits;
    int steps_needed = 0;
    for (int i = 0; i < n_rows; ++i) {
        steps_needed = std::max(steps_needed, rows[i].loop_end - rows[i].loop_begin);
        call.adaptive = call.adaptive || rows[i].exit_threshold > 0;
        call.loops_run.push_back(rows[i].loop_end);
    }
    call.left.assign(static_cast<size_t>(n_rows), 0);
    call.stayed.assign(static_cast<size_t>(n_rows), 1.0f);
    call.fresh = plan(call, 0, [](const tl_row& r, int) { return r.loop_begin == 0; });
    for (int step = 0; step < steps_needed; ++step)
        call.core.push_back(
            plan(call, step, [step](const tl_row& r, int) { return r.loop_begin + step < r.loop_end; }));
    call.coda = plan(call, 0, [](const tl_row& r, int) { return (r.flags & (TL_ROW_CODA | TL_ROW_LOGITS)) != 0; });
    call.head = plan(call, 0, [](const tl_row& r, int) { return (r.flags & TL_ROW_LOGITS) != 0; });
    reserve_attention(call);
    pool_.run([&](int id) { work(call, id); });
    if (loops_run) std::copy(call.loops_run.begin(), call.loops_run.end(), loops_run);
}

void tl_model::work(Call& call, int id) {
    const int fixed = desc.n_prelude + desc.n_coda;
    embed(call, id);
    for (int i = 0; i < desc.n_prelude && !call.fresh.rows.empty(); ++i) layer(call, call.fresh, i, {i, 0}, id);
    begin_core(call, id);
    for (size_t step = 0; step < call.core.size() && !call.core[step].rows.empty(); ++step) {
        const Plan& plan = call.core[step];
        if (call.adaptive) remember(plan, id);
        inject(plan, id);
        for (int i = 0; i < desc.n_core; ++i) layer(call, plan, desc.n_prelude + i, {fixed + i, desc.n_core}, id);
        norm_in_place(plan, weights_.loop_norm, id);
        if (call.adaptive) leave_early(call, step, id);
    }
    save_states(call, id);
    if (call.coda.rows.empty()) return;
    norm_in_place(call.coda, weights_.core_norm, id);
    for (int i = 0; i < desc.n_coda; ++i)
        layer(call, call.coda, desc.n_prelude + desc.n_core + i, {desc.n_prelude + i, 0}, id);
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
        project(weights_.inject, {pair_.as<float>(), 2 * d}, plan, nullptr, 0, true, id);
}

// ---------------------------------------------------------------- one layer

void tl_model::layer(const Call& call, const Plan& plan, int index, Visits visits, int id) {
    const LayerWeights& w = weights_.layers[index];
    const bool plain = desc.norm == TL_NORM_PRE;
    if (id == 0) steps.fetch_add(1, std::memory_order_relaxed);

    normed_input(plan, w.attn_norm, id);
    project(w.qkv, {normed_.as<float>(), ldx_}, plan, qkv_.as<float>(), ldq_, false, id);
    position_and_append(call, plan, w, visits, id);
    attention(call, plan, w, visits, id);
    project(w.wo, {attended_.as<float>(), lda_}, plan, out_.as<float>(), ldx_, plain, id);
    residual(plan, w.attn_post_norm, id);

    normed_input(plan, w.ffn_norm, id);
    const int n = static_cast<int>(plan.rows.size());
    const auto [begin, end] = share(w.w_gate.panels(), id, pool_.threads());
    float* scratch = scratch_[id].as<float>();
    kernels->product(w.w_gate.view(), {normed_.as<float>(), ldx_}, n, gate_.as<float>(), ldf_, nullptr, Put::store,
                     begin, end, scratch);
    kernels->product(w.w_up.view(), {normed_.as<float>(), ldx_}, n, up_.as<float>(), ldf_, nullptr, Put::store, begin,
                     end, scratch);
    for (int m = 0; m < n && begin < end; ++m) {
        const size_t at = static_cast<size_t>(m) * ldf_ + begin * kPanel;
        kernels->swiglu(gate_.as<float>() + at, up_.as<float>() + at, (end - begin) * kPanel);
    }
    pool_.barrier();
    project(w.w_down, {gate_.as<float>(), ldf_}, plan, out_.as<float>(), ldx_, plain, id);
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
void tl_model::project(const Matrix& w, const Activations& a, const Plan& plan, float* c, int ldc, bool to_x, int id) {
    const auto [begin, end] = share(w.panels(), id, pool_.threads());
    const int n = static_cast<int>(plan.rows.size());
    if (begin < end) {
        float* scratch = scratch_[id].as<float>();
        if (to_x)
            kernels->product(w.view(), a, n, x_.as<float>(), ldx_, plan.rows.data(), Put::add, begin, end, scratch);
        else
            kernels->product(w.view(), a, n, c, ldc, nullptr, Put::store, begin, end, scratch);
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

// Biases, norms and rotates queries and keys, and appends what the cache holds of each row.
void tl_model::position_and_append(const Call& call, const Plan& plan, const LayerWeights& w, Visits visits, int id) {
    const int heads = desc.n_heads, kv = desc.n_kv_heads, hd = desc.head_dim;
    const int per_row = heads + 2 * kv;
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()) * per_row, id, pool_.threads());
    for (int task = begin; task < end; ++task) {
        const int m = task / per_row, part = task % per_row;
        const tl_row& row = call.rows[plan.rows[m]];
        const tl_cache& cache = *call.caches[row.cache];
        const int visit = visits.at(plan.loops[m]);
        float* head = qkv_.as<float>() + static_cast<size_t>(m) * ldq_ + static_cast<size_t>(part) * head_dim_;
        const bool is_query = part < heads, is_value = part >= heads + kv;
        const int number = is_query ? part : is_value ? part - heads - kv : part - heads;
        if (!is_query && cache.holds_inputs()) {  // keys and values come from the stored input, for this row too
            if (part == heads)
                cache.append_input(visit, row.slot, row.position, normed_.as<float>() + static_cast<size_t>(m) * ldx_);
            continue;
        }
        const Vector& bias = is_query ? w.q_bias : is_value ? w.v_bias : w.k_bias;
        if (!bias.empty()) kernels->add(bias.data() + static_cast<size_t>(number) * head_dim_, hd, head);
        if (is_value) {
            cache.append_value(visit, number, row.slot, head, *kernels);
            continue;
        }
        const Vector& norm = is_query ? w.q_norm : w.k_norm;
        if (!norm.empty()) kernels->rmsnorm(head, norm.data(), desc.norm_eps, hd, head);
        rotate(head, row.position);
        if (!is_query) cache.append_key(visit, number, row.slot, head, *kernels);
    }
    if (id == 0) pool_.reset_next();
    pool_.barrier();
}

// ---------------------------------------------------------------- the ends

void tl_model::save_states(const Call& call, int id) {
    const auto [begin, end] = share(call.n_rows, id, pool_.threads());
    for (int i = begin; i < end; ++i) {
        const int state = call.rows[i].state;
        if (state < 0 || call.rows[i].flags & TL_ROW_KEEP_STATE) continue;
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
            kernels->product(matrix.view(), {normed_.as<float>(), ldx_}, n, logits_.as<float>(), ldl, nullptr,
                             Put::store, p0, p1, scratch_[id].as<float>());
        pool_.barrier();
        for (int m = begin; m < end; ++m) {
            const float* from = logits_.as<float>() + static_cast<size_t>(m) * ldl;
            float* to = call.logits + static_cast<size_t>(first + m) * vocab;
            for (int v = 0; v < vocab; ++v) to[v] = from[v] * desc.logit_scale;
        }
        pool_.barrier();
    }
}
