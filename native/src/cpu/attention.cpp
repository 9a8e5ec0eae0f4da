// Softmax attention over the caches, task by task (attention.h), in spans of slots (spans.h). A row reads exactly what
// its cache stores, its own slot included.
#include "attention.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>

#include "forward.h"
#include "slot_panel.h"

using namespace tinyloop::cpu;

void tl_model::attention(const Call& call, const Plan& plan, const LayerWeights& w, Visits visits, int id) {
    const std::vector<AttentionTask>& tasks = plan.attention.tasks;
    for (size_t t = pool_.next(); t < tasks.size(); t = pool_.next()) {
        const AttentionTask& task = tasks[t];
        const AttentionJob& job = plan.attention.jobs[task.job];
        const int visit = visits.at(plan.loops[job.first_row]);
        for (int head = task.first_head; head < task.first_head + task.heads; ++head) {
            attend(call, plan, task, w, visit, head, id);
            if (job.parts == 1) continue;
            int32_t& countdown = plan.attention.countdowns[job.countdowns + head];
            if (std::atomic_ref(countdown).fetch_sub(1, std::memory_order_acq_rel) == 1)
                fold_partials(call, plan, job, head, id);
        }
    }
    pool_.barrier();
}

namespace {

AttendRows rows_of(AttentionSpace& space, int query, int head_dim, float* partials) {
    return {0,
            space.q + static_cast<size_t>(query) * head_dim,
            space.q_int + static_cast<size_t>(query) * head_dim,
            space.q_step + query,
            nullptr,
            nullptr,
            partials,
            space.scratch};
}

}  // namespace

// What the job's query rows of one key head take from the task's spans.
void tl_model::attend(const Call& call, const Plan& plan, const AttentionTask& task, const LayerWeights& w, int visit,
                      int kv_head, int id) {
    const AttentionJob& job = plan.attention.jobs[task.job];
    const tl_cache& cache = *call.caches[job.cache];
    AttentionSpace& space = spaces_[id];
    const int heads = desc.n_heads / desc.n_kv_heads;
    const size_t ldp = partial_floats(head_dim_);
    const bool split = job.parts > 1;
    auto row_of = [&](int r) -> const tl_row& {
        return call.rows[plan.rows[job.first_row + (job.first_query + r) / heads]];
    };
    take_queries(job, cache, kv_head, id);
    if (!split) clear_sums(job.queries, space.sums);

    for (int s = task.first_span; s < task.first_span + task.spans; ++s) {
        const int first = s * kSpan;
        auto seen_of = [&](int r) -> Seen {
            const Seen seen = seen_by(row_of(r), cache);
            return {std::max(seen.first - first, 0), std::min(seen.last - first, kSpan)};
        };
        // A draft tree's row whose ancestors leave gaps in this span sees a copy without them.
        auto apart = [&](int r) { return has_gaps(row_of(r)) && row_of(r).base < first + kSpan; };
        auto attend_rows = [&](const Span& span, int r, int n) {
            int32_t begin[kAttendRows], end[kAttendRows];
            for (int i = 0; i < n; ++i) {
                const Seen seen = seen_of(r + i);
                begin[i] = seen.first;
                end[i] = seen.last;
            }
            float* const partials =
                split ? partials_.as<float>() +
                            (job.partials +
                             (static_cast<size_t>(kv_head) * job.spans + (s - job.first_span)) * job.queries + r) *
                                ldp
                      : space.partials;
            AttendRows rows = rows_of(space, r, head_dim_, partials);
            rows.count = n;
            rows.begin = begin;
            rows.end = end;
            kernels->attend(span, rows);
            for (int i = 0; i < n && !split; ++i)
                kernels->fold(partials + i * ldp, head_dim_, space.sums + (r + i) * ldp);
        };

        Seen all{kSpan, 0};
        int first_gap = kSpan;  // where the first copy begins
        for (int r = 0; r < job.queries; ++r) {
            const Seen seen = seen_of(r);
            if (seen.first >= seen.last) continue;
            const bool copied = apart(r);
            if (copied) first_gap = std::min(first_gap, std::max(row_of(r).base - first, 0) / kPanel * kPanel);
            all.first = std::min(all.first, seen.first);
            all.last = std::max(all.last, copied ? std::min(row_of(r).base - first, seen.last) : seen.last);
        }
        int32_t slots[kSpan];
        std::iota(slots, slots + kSpan, first);
        Span span = span_of(cache, visit, kv_head, first, all, id);
        if (cache.holds_inputs()) project_inputs(cache, w, visit, kv_head, slots, all, id);

        for (int r = 0, n; r < job.queries; r += n) {
            for (n = 0; r + n < job.queries && n < kAttendRows && !apart(r + n); ++n)
                if (const Seen seen = seen_of(r + n); seen.first >= seen.last) break;
            if (n > 0)
                attend_rows(span, r, n);
            else
                n = 1;
        }
        for (int r = 0, n; r < job.queries && first_gap < kSpan; r += n) {
            const tl_row& row = row_of(r);
            for (n = 1; r + n < job.queries && &row_of(r + n) == &row; ++n) {
            }
            const Seen seen = seen_of(r);
            if (!apart(r) || seen.first >= seen.last) continue;
            for (int i = first_gap; i < seen.last; ++i) slots[i] = slot_seen(row, first + i);
            if (cache.holds_inputs())
                project_inputs(cache, w, visit, kv_head, slots, {first_gap, seen.last}, id);
            else
                gather(cache, visit, kv_head, slots, {first_gap, seen.last}, span, id);
            attend_rows(span, r, n);
        }
    }
    if (split) return;
    for (int r = 0; r < job.queries; ++r)
        kernels->finish_attention(space.sums + r * ldp, head_dim_, attended_of(job, kv_head, r));
}

// The last task of a split job folds what all of them found.
void tl_model::fold_partials(const Call& call, const Plan& plan, const AttentionJob& job, int kv_head, int id) {
    const tl_cache& cache = *call.caches[job.cache];
    const int heads = desc.n_heads / desc.n_kv_heads;
    const size_t ldp = partial_floats(head_dim_);
    const float* partials =
        partials_.as<float>() + (job.partials + static_cast<size_t>(kv_head) * job.spans * job.queries) * ldp;
    float* const sum = spaces_[id].sums;
    plan.attention.countdowns[job.countdowns + kv_head] = job.parts;  // for the next layer
    for (int r = 0; r < job.queries; ++r) {
        const Seen seen = seen_by(call.rows[plan.rows[job.first_row + (job.first_query + r) / heads]], cache);
        clear_sums(1, sum);
        for (int s = seen.first / kSpan; s <= (seen.last - 1) / kSpan; ++s)
            kernels->fold(partials + (static_cast<size_t>(s - job.first_span) * job.queries + r) * ldp, head_dim_, sum);
        kernels->finish_attention(sum, head_dim_, attended_of(job, kv_head, r));
    }
}

void tl_model::clear_sums(int count, float* sums) const {
    const size_t ldp = partial_floats(head_dim_);
    std::memset(sums, 0, count * ldp * sizeof(float));
    for (int r = 0; r < count; ++r) sums[r * ldp + head_dim_] = kNoScore;
}

float* tl_model::attended_of(const AttentionJob& job, int kv_head, int query) const {
    const int heads = desc.n_heads / desc.n_kv_heads, number = job.first_query + query;
    return attended_.as<float>() + static_cast<size_t>(job.first_row + number / heads) * lda_ +
           static_cast<size_t>(kv_head * heads + number % heads) * head_dim_;
}

void tl_model::take_queries(const AttentionJob& job, const tl_cache& cache, int kv_head, int id) {
    AttentionSpace& space = spaces_[id];
    const int heads = desc.n_heads / desc.n_kv_heads;
    const float factor = 1.0f / std::sqrt(static_cast<float>(desc.head_dim));
    for (int r = 0; r < job.queries; ++r) {
        const int number = job.first_query + r;
        float* q = space.q + static_cast<size_t>(r) * head_dim_;
        std::memcpy(q,
                    qkv_.as<float>() + static_cast<size_t>(job.first_row + number / heads) * ldq_ +
                        static_cast<size_t>(kv_head * heads + number % heads) * head_dim_,
                    head_dim_ * sizeof(float));
        kernels->scale(q, head_dim_, factor);
        if (cache.quantized())
            kernels->round_queries(q, head_dim_, space.q_int + static_cast<size_t>(r) * head_dim_, space.q_step + r);
    }
}

// The panels of 256 slots from `first` on, those that hold slots seen.first .. seen.last - 1 of them.
Span tl_model::span_of(const tl_cache& cache, int visit, int kv_head, int first, Seen seen, int id) const {
    Span span;
    span.head_dim = head_dim_;
    const AttentionSpace& space = spaces_[id];
    if (cache.holds_inputs()) {  // what project_inputs writes
        span.dtype = TL_F32;
        span.value_slot = 2 * static_cast<size_t>(head_dim_);
        span.value_panel = kPanel;
        for (int p = 0; p < kSpanPanels; ++p)
            span.panels[p] = {reinterpret_cast<char*>(space.projected + static_cast<size_t>(p) * kPanel * head_dim_),
                              reinterpret_cast<char*>(space.heads + p * kPanel * span.value_slot + head_dim_)};
        return span;
    }
    span.dtype = cache.dtype();
    span.value_slot = cache.quantized() ? 2 * kPanel : kPanel;
    span.value_panel = kPanel * kPanel;
    for (int p = seen.first / kPanel; p * kPanel < seen.last; ++p)
        span.panels[p] = cache.panel(visit, kv_head, first + p * kPanel);
    return span;
}

// Copies slots[seen.first .. seen.last) side by side, from a panel's first slot on, and lets the span's panels point to
// the copies. What fills up the last panel is zero: no row sees it, but it is multiplied.
void tl_model::gather(const tl_cache& cache, int visit, int kv_head, const int32_t* slots, Seen seen, Span& span,
                      int id) {
    const size_t side = static_cast<size_t>(head_dim_) * kPanel * cached_bytes(cache.dtype());
    const size_t panel_bytes = 2 * side + 2 * kPanel * sizeof(float);
    for (int i = seen.first; i < seen.last; ++i) {
        char* const at = spaces_[id].gathered + static_cast<size_t>((i - seen.first) / kPanel) * panel_bytes;
        float* const scales = reinterpret_cast<float*>(at + 2 * side);
        const SlotPanel to{at, at + side, scales, scales + kPanel};
        if (i % kPanel == 0) std::memset(at, 0, panel_bytes);
        copy_slot(cache.dtype(), head_dim_, cache.panel(visit, kv_head, slots[i]), slots[i] % kPanel, to, i % kPanel);
        span.panels[i / kPanel] = to;
    }
}
