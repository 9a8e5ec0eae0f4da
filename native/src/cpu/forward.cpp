#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace tinyloop::cpu;

namespace {

constexpr int kHeadRows = 32;   // rows of logits computed at a time
constexpr int kGatePanels = 8;  // of the gated block, where one thread has many rows: gate and up stay in L2

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
      pool_(options.threads, options.cpus),
      weights_(d, options.weights, *kernels, pool_),
      max_rows_(options.max_rows),
      ldx_(pad16(d.d_model)),
      head_dim_(pad16(d.head_dim)),
      ldq_((d.n_heads + 2 * d.n_kv_heads) * head_dim_),
      lda_(d.n_heads * head_dim_),
      ldf_(pad16(d.d_ffn)),
      ldp_(pad16(2 * d.d_model)),
      integers_(weights_.integers()) {
    auto floats = [&](size_t stride) { return Buffer(static_cast<size_t>(max_rows_) * stride * sizeof(float)); };
    x_ = floats(ldx_);
    e_ = floats(ldx_);
    before_ = floats(ldx_);
    qkv_ = floats(ldq_);
    attended_ = floats(lda_);
    logits_ = Buffer(sizeof(float) * kHeadRows * weights_.head_matrix().outputs());
    for (int i = 0; i < options.threads; ++i) desks_.push_back(desk(kPartRows));
    desks_.push_back(desk(std::max(kOwnRows * options.threads, kHeadRows)));
    const int most_rows = std::max({max_rows_, kHeadRows, d.n_heads / d.n_kv_heads});
    for (int i = 0; i < options.threads; ++i) scratch_.emplace_back(sizeof(float) * kPanel * (256 + most_rows));
    if (integers_)
        for (int i = 0; i < options.threads; ++i) stored_rows_.emplace_back(AttentionSpace::kProjectedSlots, d.d_model);
    spaces_.resize(options.threads);
}

tl_model::Desk tl_model::desk(int rows) const {
    auto floats = [&](size_t stride) { return Buffer(sizeof(float) * rows * stride); };
    const bool pairs = desc.injection == TL_INJECT_CONCAT;
    return {floats(ldx_),
            pairs ? floats(ldp_) : Buffer(),
            floats(ldf_),
            floats(ldf_),
            desc.norm == TL_NORM_PRE ? Buffer() : floats(ldx_),
            integers_ ? QuantizedRows(rows, std::max({ldx_, lda_, ldf_, pairs ? ldp_ : 0})) : QuantizedRows()};
}

uint64_t tl_model::bytes() const {
    uint64_t total = weights_.bytes();
    for (const Buffer* b : {&x_, &e_, &before_, &qkv_, &attended_, &logits_}) total += b->bytes();
    for (const Desk& d : desks_) total += d.bytes();
    for (const Buffer& b : scratch_) total += b.bytes();
    for (const QuantizedRows& rows : stored_rows_) total += rows.bytes();
    for (const AttentionSpace& space : spaces_) total += space.bytes();
    return total + partials_.bytes();
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
    int steps_needed = 0, positions = 0;
    for (int i = 0; i < n_rows; ++i) {
        steps_needed = std::max(steps_needed, rows[i].loop_end - rows[i].loop_begin);
        positions = std::max(positions, rows[i].position + 1);
        call.adaptive = call.adaptive || rows[i].exit_threshold > 0;
        call.appends_kv = call.appends_kv || !caches[rows[i].cache]->holds_inputs();
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
    reserve_angles(positions);
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
    std::vector<float> embedding(weights_.embed.inputs());
    for (int i = begin; i < end; ++i) {
        const tl_row& row = call.rows[i];
        float* x = x_.as<float>() + static_cast<size_t>(i) * ldx_;
        float* e = e_.as<float>() + static_cast<size_t>(i) * ldx_;
        if (row.loop_begin > 0) {
            std::memcpy(x, call.states->core.as<float>() + static_cast<size_t>(row.state) * ldx_, sizeof(float) * ldx_);
            std::memcpy(e, call.states->prelude.as<float>() + static_cast<size_t>(row.state) * ldx_,
                        sizeof(float) * ldx_);
        } else {
            weights_.embed.row(row.token, embedding.data());
            for (int k = 0; k < desc.d_model; ++k) x[k] = embedding[k] * desc.embed_scale;
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
    each_part(plan, id, [&](const Part& part) {
        const auto [begin, end] = mine(part, part.count, id);
        Desk& desk = desk_of(part, id);
        for (int m = begin; m < end; ++m) {
            float* x = row_of(x_, plan, part.first + m);
            const float* e = row_of(e_, plan, part.first + m);
            if (desc.injection == TL_INJECT_ADD) {
                kernels->add(e, d, x);
            } else {
                float* pair = desk.pair.as<float>() + static_cast<size_t>(m) * ldp_;
                std::memcpy(pair, x, sizeof(float) * d);
                std::memcpy(pair + d, e, sizeof(float) * d);
                if (integers_) desk.quantized.set(m, pair, 2 * d, *kernels);
                std::memset(x, 0, sizeof(float) * ldx_);
            }
        }
        if (desc.injection == TL_INJECT_ADD) return;
        meet(part);
        const auto [first, last] = mine(part, weights_.inject.panels(), id);
        kernels->product(weights_.inject.view(), desk.quantized.with(desk.pair.as<float>(), ldp_), part.count,
                         x_.as<float>(), ldx_, plan.rows.data() + part.first, Put::add, first, last,
                         scratch_[id].as<float>());
    });
    pool_.barrier();
}

// ---------------------------------------------------------------- one layer

void tl_model::layer(const Call& call, const Plan& plan, int index, Visits visits, int id) {
    const LayerWeights& w = weights_.layers[index];
    if (id == 0) steps.fetch_add(1, std::memory_order_relaxed);

    each_part(plan, id, [&](const Part& part) { project_heads(call, plan, part, w, visits, id); });
    if (id == 0) pool_.reset_next();
    pool_.barrier();
    attention(call, plan, w, visits, id);
    each_part(plan, id, [&](const Part& part) { finish_layer(plan, part, w, id); });
    pool_.barrier();
}

// Queries, keys and values of a part's rows. A thread takes whole heads, so that it can go on with them by itself;
// only where that would leave some threads far fewer panels does it wait for the others first.
void tl_model::project_heads(const Call& call, const Plan& plan, const Part& part, const LayerWeights& w, Visits visits,
                             int id) {
    const Activations x = normed(plan, part, w.attn_norm, id);
    // Where caches hold inputs, keys and values come from those, for this row too.
    const int heads = desc.n_heads + (call.appends_kv ? 2 * desc.n_kv_heads : 0), per_head = head_dim_ / kPanel;
    const Share own = mine(part, heads, id);
    const bool by_head = part.alone || heads % pool_.threads() == 0 || heads >= 4 * pool_.threads();
    const Share panels = by_head ? Share{own.begin * per_head, own.end * per_head} : mine(part, heads * per_head, id);
    kernels->product(w.qkv.view(), x, part.count, qkv_.as<float>() + static_cast<size_t>(part.first) * ldq_, ldq_,
                     nullptr, Put::store, panels.begin, panels.end, scratch_[id].as<float>());
    if (!by_head) pool_.barrier();
    append(call, plan, part, w, visits, x.x, own);
}

// Biases, norms and rotates the queries and keys of `heads`, and appends what the cache holds of each row.
void tl_model::append(const Call& call, const Plan& plan, const Part& part, const LayerWeights& w, Visits visits,
                      const float* normed, Share heads) {
    const int queries = desc.n_heads, kv = desc.n_kv_heads, hd = desc.head_dim;
    for (int m = 0; m < part.count && heads.begin < heads.end; ++m) {
        const int at = part.first + m;
        const tl_row& row = call.rows[plan.rows[at]];
        const tl_cache& cache = *call.caches[row.cache];
        const int visit = visits.at(plan.loops[at]);
        if (cache.holds_inputs() && heads.begin == 0)
            cache.append_input(visit, row.slot, row.position, normed + static_cast<size_t>(m) * ldx_);
        for (int i = heads.begin; i < heads.end; ++i) {
            const bool is_query = i < queries, is_value = i >= queries + kv;
            if (!is_query && cache.holds_inputs()) break;
            const int number = is_query ? i : is_value ? i - queries - kv : i - queries;
            float* head = qkv_.as<float>() + static_cast<size_t>(at) * ldq_ + static_cast<size_t>(i) * head_dim_;
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
    }
}

// What follows attention: its output, then the gated block, each added to x.
void tl_model::finish_layer(const Plan& plan, const Part& part, const LayerWeights& w, int id) {
    Desk& desk = desk_of(part, id);
    const float* attended = attended_.as<float>() + static_cast<size_t>(part.first) * lda_;
    take_in(plan, part, w.wo, readied(part, attended, lda_, lda_, id), w.attn_post_norm, desk, id);
    meet(part);
    gated(part, w, normed(plan, part, w.ffn_norm, id), desk, id);
    meet(part);
    take_in(plan, part, w.w_down, readied(part, desk.gate.as<float>(), ldf_, desc.d_ffn, id), w.ffn_post_norm, desk,
            id);
}

// gate = silu(gate) * up. Of many rows a few panels at a time, while they are in the cache.
void tl_model::gated(const Part& part, const LayerWeights& w, const Activations& normed, Desk& desk, int id) {
    const auto [begin, end] = mine(part, w.w_gate.panels(), id);
    float *gate = desk.gate.as<float>(), *up = desk.up.as<float>(), *scratch = scratch_[id].as<float>();
    for (int first = begin, last; first < end; first = last) {
        last = part.alone ? std::min(first + kGatePanels, end) : end;
        kernels->product(w.w_gate.view(), normed, part.count, gate, ldf_, nullptr, Put::store, first, last, scratch);
        kernels->product(w.w_up.view(), normed, part.count, up, ldf_, nullptr, Put::store, first, last, scratch);
        for (int m = 0; m < part.count; ++m) {
            const size_t at = static_cast<size_t>(m) * ldf_ + first * kPanel;
            kernels->swiglu(gate + at, up + at, (last - first) * kPanel);
        }
    }
}

// Adds w a[m] to x, with the norm after it where the placement has one.
void tl_model::take_in(const Plan& plan, const Part& part, const Matrix& w, const Activations& a,
                       const Vector& post_norm, Desk& desk, int id) {
    const int d = desc.d_model;
    const auto [first, last] = mine(part, w.panels(), id);
    float* scratch = scratch_[id].as<float>();
    if (desc.norm == TL_NORM_PRE) {
        kernels->product(w.view(), a, part.count, x_.as<float>(), ldx_, plan.rows.data() + part.first, Put::add, first,
                         last, scratch);
        return;
    }
    kernels->product(w.view(), a, part.count, desk.out.as<float>(), ldx_, nullptr, Put::store, first, last, scratch);
    meet(part);
    const auto [begin, end] = mine(part, part.count, id);
    for (int m = begin; m < end; ++m) {
        float* x = row_of(x_, plan, part.first + m);
        float* out = desk.out.as<float>() + static_cast<size_t>(m) * ldx_;
        if (desc.norm == TL_NORM_SANDWICH) {
            kernels->rmsnorm(out, post_norm.data(), desc.norm_eps, d, out);
            kernels->add(out, d, x);
        } else {
            kernels->add(out, d, x);
            kernels->rmsnorm(x, post_norm.data(), desc.norm_eps, d, x);
        }
    }
}

// The part's rows of x, normed: (part.count, ldx). x itself where the placement has no norm before.
Activations tl_model::normed(const Plan& plan, const Part& part, const Vector& norm, int id) {
    Desk& desk = by_itself(part) ? desks_[id] : desks_.back();
    const auto [begin, end] = by_itself(part) ? Share{0, part.count} : mine(part, part.count, id);
    for (int m = begin; m < end; ++m) {
        const float* x = row_of(x_, plan, part.first + m);
        float* y = desk.normed.as<float>() + static_cast<size_t>(m) * ldx_;
        if (norm.empty())
            std::memcpy(y, x, sizeof(float) * ldx_);
        else
            kernels->rmsnorm(x, norm.data(), desc.norm_eps, desc.d_model, y);
        if (integers_) desk.quantized.set(m, y, desc.d_model, *kernels);
    }
    if (!by_itself(part)) pool_.barrier();
    return desk.quantized.with(desk.normed.as<float>(), ldx_);
}

// Rows that all threads have finished, as products read them; n: their true elements.
Activations tl_model::readied(const Part& part, const float* x, int ldx, int n, int id) {
    if (!integers_) return {x, ldx};
    QuantizedRows& rows = (by_itself(part) ? desks_[id] : desks_.back()).quantized;
    const auto [begin, end] = by_itself(part) ? Share{0, part.count} : mine(part, part.count, id);
    for (int m = begin; m < end; ++m) rows.set(m, x + static_cast<size_t>(m) * ldx, n, *kernels);
    if (!by_itself(part)) pool_.barrier();
    return rows.with(x, ldx);
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
    const auto [first, last] = share(matrix.panels(), id, pool_.threads());
    for (int row = 0; row < total; row += kHeadRows) {
        const Part part{row, std::min(kHeadRows, total - row), false};
        const Activations x = normed(call.head, part, weights_.final_norm, id);
        kernels->product(matrix.view(), x, part.count, logits_.as<float>(), ldl, nullptr, Put::store, first, last,
                         scratch_[id].as<float>());
        for (int m = 0; m < part.count; ++m) {  // its own columns: nothing to wait for
            const float* from = logits_.as<float>() + static_cast<size_t>(m) * ldl;
            float* to = call.logits + static_cast<size_t>(row + m) * vocab;
            for (int v = first * kPanel; v < std::min(last * kPanel, vocab); ++v) to[v] = from[v] * desc.logit_scale;
        }
        pool_.barrier();
    }
}
