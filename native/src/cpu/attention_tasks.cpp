// Shares out attention: jobs, tasks of about equal work, and the memory they need.
#include <algorithm>

#include "attention.h"
#include "forward.h"

using namespace tinyloop::cpu;

namespace {

constexpr int kTasksPerThread = 4;       // enough for all threads to end together
constexpr int64_t kLeastWork = 1 << 17;  // a smaller task costs more to hand out than to do

}  // namespace

int tinyloop::cpu::slot_seen(const tl_row& row, int i) {
    if (i < row.base) return i;
    uint64_t tree = row.tree;
    for (int earlier = row.base; earlier < i; ++earlier) tree &= tree - 1;
    return row.base + __builtin_ctzll(tree);
}

void AttentionSpace::reserve(int queries, int head_dim, int inputs) {
    const size_t hd = static_cast<size_t>(head_dim), rows = static_cast<size_t>(queries);
    size_t total = 0;
    auto place = [&](auto*& to, size_t count) {
        to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(memory_.as<char>() + total);
        total += (count * sizeof(*to) + 63) & ~size_t{63};
    };
    auto place_all = [&] {
        total = 0;
        place(q, rows * hd);
        place(q_step, rows);
        place(q_int, rows * hd);
        place(sums, rows * partial_floats(head_dim));
        place(partials, kAttendRows * partial_floats(head_dim));
        place(scratch, attend_scratch(kAttendRows, head_dim));
        place(gathered, kGatheredPanels * (2 * hd * kPanel * sizeof(uint16_t) + 2 * kPanel * sizeof(float)));
        place(projected, inputs ? kSpan * hd : 0);
        place(heads, inputs ? 2 * kSpan * hd : 0);
        place(this->inputs, static_cast<size_t>(inputs) * kProjectedSlots);
    };
    place_all();
    if (memory_.bytes() >= total) return;
    memory_ = Buffer(total);
    place_all();
}

void tl_model::share_attention(const Call& call, Plan& plan) {
    const int heads = desc.n_heads / desc.n_kv_heads, count = static_cast<int>(plan.rows.size());
    AttentionTasks& out = plan.attention;
    std::vector<int64_t> work;  // per job and key head
    int64_t total = 0;
    for (int begin = 0, end; begin < count; begin = end) {
        const int number = call.rows[plan.rows[begin]].cache;
        const tl_cache& cache = *call.caches[number];
        for (end = begin + 1;
             end < count && call.rows[plan.rows[end]].cache == number && plan.loops[end] == plan.loops[begin];)
            ++end;
        // Stored inputs are projected once for all rows; keys and values are read by every 48 query rows again.
        const int all = (end - begin) * heads, most = cache.holds_inputs() ? all : kAttendRows;
        for (int first = 0; first < all; first += most) {
            const int queries = std::min(most, all - first);
            Seen seen{INT32_MAX, 0};
            int64_t slots = 0;
            for (int q = first; q < first + queries; ++q) {
                const Seen row = seen_by(call.rows[plan.rows[begin + q / heads]], cache);
                seen = {std::min(seen.first, row.first), std::max(seen.last, row.last)};
                slots += row.last - row.first;
            }
            if (cache.holds_inputs()) slots += static_cast<int64_t>(seen.last - seen.first) * desc.d_model;
            const int first_span = seen.first / kSpan, spans = (seen.last - 1) / kSpan + 1 - first_span;
            out.jobs.push_back({number, begin, first, queries, first_span, spans, 1, 0, 0});
            work.push_back(2 * slots * head_dim_);
            total += work.back() * desc.n_kv_heads;
        }
    }

    const int threads = pool_.threads();
    const int64_t fair = total / (threads * kTasksPerThread) + 1;
    size_t partials = 0;
    for (int j = 0; j < static_cast<int>(out.jobs.size()); ++j) {
        AttentionJob& job = out.jobs[j];
        if (threads > 1) job.parts = static_cast<int>(std::min<int64_t>(job.spans, (work[j] + fair - 1) / fair));
        if (job.parts > 1) {
            job.partials = static_cast<int>(partials);
            job.countdowns = static_cast<int>(out.countdowns.size());
            partials += static_cast<size_t>(desc.n_kv_heads) * job.spans * job.queries;
            out.countdowns.insert(out.countdowns.end(), desc.n_kv_heads, job.parts);
        }
        const int64_t together = job.parts > 1 ? 1 : std::min(fair, kLeastWork) / work[j] + 1;
        const int step = static_cast<int>(std::min<int64_t>(together, desc.n_kv_heads));
        for (int head = 0; head < desc.n_kv_heads; head += step)
            for (int part = 0; part < job.parts; ++part) {
                const Share spans = share(job.spans, part, job.parts);
                const int some = std::min(step, desc.n_kv_heads - head);
                out.tasks.push_back(
                    {j, head, some, job.first_span + spans.begin, spans.end - spans.begin, work[j] * some / job.parts});
            }
    }
    std::stable_sort(out.tasks.begin(), out.tasks.end(),
                     [](const AttentionTask& a, const AttentionTask& b) { return a.work > b.work; });
    const size_t bytes = partials * partial_floats(head_dim_) * sizeof(float);
    if (partials_.bytes() < bytes) partials_ = Buffer(bytes);
}

void tl_model::reserve_attention(const Call& call) {
    int most = 0, inputs = 0;
    for (const Plan* plan : {&call.fresh, &call.coda})
        for (const AttentionJob& job : plan->attention.jobs) most = std::max(most, job.queries);
    for (const Plan& plan : call.core)
        for (const AttentionJob& job : plan.attention.jobs) most = std::max(most, job.queries);
    for (int i = 0; i < call.n_rows; ++i)
        if (call.caches[call.rows[i].cache]->holds_inputs()) inputs = pad32(desc.d_model);
    for (AttentionSpace& space : spaces_) space.reserve(most, head_dim_, inputs);
}
