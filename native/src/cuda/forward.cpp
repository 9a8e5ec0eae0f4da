#include "forward.h"

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "best.h"
#include "multiply.h"
#include "settle.h"

using namespace tinyloop::gpu;

namespace {

constexpr int kLogitRows = 32;      // rows of logits computed at a time
constexpr int kGraphRows = 32;      // the largest decode step that a graph is recorded for
constexpr size_t kMostGraphs = 64;  // of different shapes
constexpr int kEnoughBlocks = 256;  // of attention: from here on a split needs no block of its own
constexpr size_t kMostPartialBytes = size_t{64} << 20;

int power_of_two(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

int weights_type(int wanted) {
    if (wanted == TL_INT8 || wanted == TL_INT4)
        throw Unavailable("weights: this device takes fp16, bf16 and what the artifact holds, not int8 and int4");
    return wanted;
}

int pending_kind(int norm) { return norm == TL_NORM_PRE ? kAdd : norm == TL_NORM_SANDWICH ? kAddNormed : kAddThenNorm; }

}  // namespace

// ---------------------------------------------------------------- model

tl_model::tl_model(const tl_model_desc& d, const tl_options& options)
    : device(std::make_shared<Device>(options.device)),
      desc(d),
      max_rows(options.max_rows),
      shape_{d.d_model, d.n_heads,    d.n_kv_heads,         d.head_dim,
             d.d_ffn,   d.vocab_size, padded(d.d_model, 8), d.n_heads / d.n_kv_heads,
             d.rope,    d.norm_eps},
      heads_per_block_(std::min(shape_.queries, most_queries(d.head_dim))),
      blocks_per_key_head_(static_cast<int>(blocks(shape_.queries, heads_per_block_))),
      weights_(*device, d, weights_type(options.weights)) {
    limits_ = {std::max(1, most_queries(d.head_dim) / shape_.queries), tile_slots(d.head_dim), 2 * d.n_kv_heads,
               d.head_dim};
    const auto rows = [&](int width, int count) {
        return Memory(*device, sizeof(float) * static_cast<size_t>(width) * static_cast<size_t>(count));
    };
    for (Memory* memory : {&x_, &y_, &e_, &before_, &out_}) *memory = rows(shape_.width, max_rows);
    queries_ = rows(d.n_heads * d.head_dim, max_rows);
    attended_ = rows(padded(d.n_heads * d.head_dim, 4), max_rows);
    gated_ = rows(padded(d.d_ffn, 4), max_rows);
    prepared_ = rows(padded(std::max(d.d_model, weights_.inject.inputs), 4), max_rows);
    logits_ = rows(d.vocab_size, std::min(kLogitRows, max_rows));
    loops_run_ = rows(1, max_rows);
    stayed_ = rows(1, max_rows);
    arrived_ = rows(d.n_kv_heads * blocks_per_key_head_, std::max(max_rows, kGraphRows));
    device->clear(arrived_.as<void>(), arrived_.bytes());
    device->wait();
}

tl_model::~tl_model() { forget_graphs(); }

void tl_model::forget_graphs() {
    for (auto& [shape, recorded] : graphs_) device->release_graph(recorded.graph);
    graphs_.clear();
}

// A graph holds the addresses of the work space.
void tl_model::reserve(Memory& memory, size_t bytes) {
    if (memory.bytes() >= bytes) return;
    Memory larger(*device, bytes);
    forget_graphs();
    memory = std::move(larger);
}

// All memory of the call, before any work: after a refusal nothing has changed.
void tl_model::prepare(const Call& call, const Plan& plan) {
    const size_t pair_bytes = 2 * sizeof(float), pairs = static_cast<size_t>(desc.head_dim) / 2;
    const size_t known = angles_.bytes() / (pair_bytes * pairs);
    if (static_cast<size_t>(plan.positions) > known) {
        const size_t positions = std::max({static_cast<size_t>(plan.positions), 2 * known, size_t{64}});
        std::vector<float> angles;
        for (size_t p = 0; p < positions; ++p)
            for (size_t k = 0; k < pairs; ++k) {
                const double turn = static_cast<double>(p) *
                                    std::pow(double(desc.rope_theta), -2.0 * static_cast<double>(k) / desc.head_dim);
                angles.push_back(static_cast<float>(std::cos(turn)));
                angles.push_back(static_cast<float>(std::sin(turn)));
            }
        reserve(angles_, angles.size() * sizeof(float));
        device->upload(angles_.as<void>(), angles.data(), angles.size() * sizeof(float));
    }
    reserve(table_, plan.bytes());
    reserve(projected_, plan.projected_floats * sizeof(float));
    int splits = 0;
    for (const ListPlan* list : {&plan.fresh, &plan.coda}) splits = std::max(splits, splits_of(call, *list));
    for (const ListPlan& list : plan.core) splits = std::max(splits, splits_of(call, list));
    reserve(partial_, partial_bytes(call.row_count, splits));
    const size_t ranks = sizeof(tl_rank) * static_cast<size_t>(std::min(kLogitRows, call.row_count) * call.best);
    reserve(best_, ranks);
    reserve(found_, ranks * blocks(desc.vocab_size, kSlice));
}

void tl_model::forward(tl_cache* const* caches, tl_states* states, const tl_row* rows, int n_rows, float* logits,
                       tl_rank* best, int32_t* loops_run) {
    if (n_rows <= 0) return;
    const bool again = n_rows <= std::min(kGraphRows, max_rows) && repeats(caches, rows, n_rows);
    const int padded_rows = again ? std::min(power_of_two(n_rows), max_rows) : 0;
    Plan plan(limits_, caches, rows, n_rows, padded_rows);
    const int most_best = plan.most_best ? power_of_two(plan.most_best) : 0;
    Call call{&plan, states, {}, std::max(n_rows, padded_rows), most_best, again, {}};
    prepare(call, plan);
    const std::vector<char> table = plan.table(projected_.as<float>());
    device->upload(table_.as<void>(), table.data(), table.size());
    call.rows = {table_.as<tl_row>(), reinterpret_cast<const CacheView*>(table_.as<char>() + plan.views_at()),
                 loops_run_.as<int32_t>(), stayed_.as<float>()};
    if (again)
        run_again(call, rows[0].loop_end);
    else
        work(call);
    std::vector<const tl_row*> wanted;
    for (int i = 0; i < n_rows; ++i)
        if (rows[i].flags & TL_ROW_LOGITS) wanted.push_back(rows + i);
    const int total = static_cast<int>(wanted.size());
    for (int first = 0; first < total; first += kLogitRows) {
        const int count = std::min(kLogitRows, total - first);
        if (!again) head(call, first, count);
        fetch(call, wanted.data() + first, count, logits, best);
    }
    if (loops_run) device->download(loops_run, loops_run_.as<void>(), sizeof(int32_t) * static_cast<size_t>(n_rows));
    device->wait();
}

// A decode step: as a graph, once its shape has come for the second time.
void tl_model::run_again(Call& call, int loops) {
    const auto whole = [&] {
        work(call);
        head(call, 0, call.row_count);
    };
    if (graphs_.size() >= kMostGraphs) forget_graphs();
    Recorded& recorded =
        graphs_[{call.row_count, loops, splits_of(call, call.plan->all), call.best, call.plan->adaptive}];
    if (!recorded.wanted || !records_graphs_) {
        recorded.wanted = true;
        return whole();
    }
    if (!recorded.graph) {
        const uint64_t before = steps.load();
        try {
            device->begin_graph();
            whole();
            recorded.graph = device->end_graph();
        } catch (const std::runtime_error&) {  // this device or driver records none: kernels one by one then
            device->abandon_graph();
            records_graphs_ = false;
        }
        recorded.steps = steps.exchange(before) - before;
        if (!recorded.graph) return whole();
    }
    device->run_graph(recorded.graph);
    steps.fetch_add(recorded.steps);
}

void tl_model::work(Call& call) {
    const Plan& plan = *call.plan;
    const int fixed = desc.n_prelude + desc.n_coda;
    embed(call);
    if (plan.fresh.count) {
        for (int i = 0; i < desc.n_prelude; ++i) layer(call, plan.fresh, -1, i, {i, 0});
        settle(call, plan.fresh, -1, Memory(), true);
    }
    for (int step = 0; step < static_cast<int>(plan.core.size()); ++step) {
        const ListPlan& list = plan.core[static_cast<size_t>(step)];
        inject(call, list, step);
        for (int i = 0; i < desc.n_core; ++i) layer(call, list, step, desc.n_prelude + i, {fixed + i, desc.n_core});
        settle(call, list, step, weights_.loop_norm, false);
    }
    if (plan.keeps_states)
        launch(*device, dim3(static_cast<unsigned>(plan.all.count)), kThreads, 0, tinyloop::gpu::keep,
               Keep{shape_, call.rows, list_of(call, plan.all, -1), x_.as<float>(), e_.as<float>(),
                    call.states->core.as<float>(), call.states->prelude.as<float>()});
    if (!plan.coda.count) return;
    if (weights_.core_norm.bytes()) settle(call, plan.coda, -1, weights_.core_norm, false);
    for (int i = 0; i < desc.n_coda; ++i)
        layer(call, plan.coda, -1, desc.n_prelude + desc.n_core + i, {desc.n_prelude + i, 0});
}

// ---------------------------------------------------------------- between the layers

List tl_model::list_of(const Call& call, const ListPlan& list, int step) const {
    return {reinterpret_cast<const int32_t*>(table_.as<char>() + call.plan->entries_at()) + list.entries, list.count,
            step};
}

void tl_model::embed(Call& call) {
    const Matrix& matrix = weights_.embed;
    const ListPlan& list = call.plan->all;
    launch(
        *device, dim3(static_cast<unsigned>(list.count)), kThreads, 0, tinyloop::gpu::embed,
        Embed{shape_, call.rows, list_of(call, list, -1), matrix.memory.as<void>(), matrix.dtype, matrix.stride,
              desc.embed_scale, x_.as<float>(), e_.as<float>(), call.states ? call.states->core.as<float>() : nullptr,
              call.states ? call.states->prelude.as<float>() : nullptr,
              call.plan->adaptive ? before_.as<float>() : nullptr});
    call.pending = {kNothing, nullptr, nullptr};
}

void tl_model::settle(Call& call, const ListPlan& list, int step, const Memory& norm, bool begins_core) {
    if (!list.count) return;
    const bool watches = call.plan->adaptive && (begins_core || step >= 0);
    launch(*device, dim3(static_cast<unsigned>(list.count)), kThreads, sizeof(float) * 2 * kWarps,
           tinyloop::gpu::settle,
           Settle{shape_,
                  call.rows,
                  list_of(call, list, step),
                  residual(x_, call.pending),
                  norm.as<float>(),
                  x_.as<float>(),
                  begins_core ? e_.as<float>() : nullptr,
                  begins_core && desc.start == TL_START_ZEROS,
                  watches ? before_.as<float>() : nullptr,
                  weights_.exit_gate.as<float>(),
                  weights_.exit_gate_bias.as<float>(),
                  {desc.n_prelude + desc.n_coda, desc.n_core},
                  desc.n_core});
    call.pending = {kNothing, nullptr, nullptr};
}

void tl_model::inject(Call& call, const ListPlan& list, int step) {
    if (desc.injection == TL_INJECT_ADD) call.pending = {kAdd, e_.as<float>(), nullptr};
    if (desc.injection != TL_INJECT_CONCAT) return;
    Product p = product(call, list, step, weights_.inject);
    p.input = Input::pair;
    p.residual.x = x_.as<float>();
    p.e = e_.as<float>();
    p.to = out_.as<float>();
    p.to_width = shape_.width;
    multiply(p, list.count, weights_.inject.dtype);
    call.pending = {kReplace, out_.as<float>(), nullptr};
}

// ---------------------------------------------------------------- one layer

void tl_model::layer(Call& call, const ListPlan& list, int step, int index, Visits visits) {
    const Layer& w = weights_.layers[static_cast<size_t>(index)];
    const int heads_width = desc.n_heads * desc.head_dim, kind = pending_kind(desc.norm);
    steps.fetch_add(1, std::memory_order_relaxed);

    Product p = product(call, list, step, w.qkv);
    p.input = Input::residual;
    p.residual = residual(x_, call.pending);
    p.norm = w.attn_norm.as<float>();
    p.resolved = y_.as<float>();
    p.output = Output::heads;
    p.outputs = (desc.n_heads + (call.plan->appends_kv ? 2 * desc.n_kv_heads : 0)) * desc.head_dim;
    p.to = queries_.as<float>();
    p.to_width = heads_width;
    p.heads = {w.q_bias.as<float>(), w.k_bias.as<float>(), w.v_bias.as<float>(),
               w.q_norm.as<float>(), w.k_norm.as<float>(), angles_.as<float>()};
    p.visits = visits;
    multiply(p, list.count, w.qkv.dtype);

    if (list.n_tiles) {
        p.input = Input::stored;
        p.output = Output::kept;
        p.weights = static_cast<const char*>(p.weights) + static_cast<size_t>(heads_width) * w.qkv.row_bytes();
        p.outputs = 2 * desc.n_kv_heads * desc.head_dim;
        p.slots = reinterpret_cast<const SlotTile*>(table_.as<char>() + call.plan->tiles_at()) + list.tiles;
        multiply(p, list.n_tiles * limits_.tile_slots, w.qkv.dtype);
    }
    attention(call, list, step, visits);

    p = product(call, list, step, w.wo);
    p.from = attended_.as<float>();
    p.from_width = padded(heads_width, 4);
    p.to = out_.as<float>();
    p.to_width = shape_.width;
    multiply(p, list.count, w.wo.dtype);

    p = product(call, list, step, w.gate_up);
    p.input = Input::residual;
    p.residual = residual(y_, {kind, out_.as<float>(), w.attn_post_norm.as<float>()});
    p.norm = w.ffn_norm.as<float>();
    p.resolved = x_.as<float>();
    p.output = Output::gated;
    p.outputs = desc.d_ffn;
    p.to = gated_.as<float>();
    p.to_width = padded(desc.d_ffn, 4);
    multiply(p, list.count, w.gate_up.dtype);

    p = product(call, list, step, w.down);
    p.from = gated_.as<float>();
    p.from_width = padded(desc.d_ffn, 4);
    p.to = out_.as<float>();
    p.to_width = shape_.width;
    multiply(p, list.count, w.down.dtype);
    call.pending = {kind, out_.as<float>(), w.ffn_post_norm.as<float>()};
}

// 0: a block takes all splits of its group.
int tl_model::splits_of(const Call& call, const ListPlan& list) const {
    int splits = static_cast<int>(blocks(list.longest, kSplit));
    if (call.again) splits = power_of_two(splits);  // so that a graph serves longer contexts too
    const int already = list.n_groups * desc.n_kv_heads * blocks_per_key_head_;
    return splits <= 1 || already >= kEnoughBlocks || partial_bytes(call.row_count, splits) > kMostPartialBytes
               ? 0
               : splits;
}

size_t tl_model::partial_bytes(int rows, int splits) const {
    return sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(splits) * static_cast<size_t>(desc.n_heads) *
           (static_cast<size_t>(desc.head_dim) + 2);
}

void tl_model::attention(Call& call, const ListPlan& list, int step, Visits visits) {
    if (!list.count) return;
    const int splits = splits_of(call, list);
    launch(*device,
           dim3(static_cast<unsigned>(list.n_groups), static_cast<unsigned>(desc.n_kv_heads * blocks_per_key_head_),
                static_cast<unsigned>(std::max(splits, 1))),
           kAttentionThreads, attention_shared(desc.head_dim), tinyloop::gpu::attention,
           Attention{shape_, call.rows, list_of(call, list, step),
                     reinterpret_cast<const Group*>(table_.as<char>() + call.plan->groups_at()) + list.groups, visits,
                     queries_.as<float>(), heads_per_block_, blocks_per_key_head_, splits, partial_.as<float>(),
                     arrived_.as<int>(), attended_.as<float>(), padded(desc.n_heads * desc.head_dim, 4)});
}

void tl_model::head(Call& call, int first, int count) {
    const Matrix& matrix = weights_.head_matrix();
    Product p = product(call, call.plan->head, -1, matrix);
    p.list.entries += first;
    p.list.count = count;
    p.input = Input::residual;
    p.residual = residual(x_, call.pending);
    p.norm = weights_.final_norm.as<float>();
    p.output = Output::logits;
    p.to = logits_.as<float>();
    p.to_width = desc.vocab_size;
    p.scale = desc.logit_scale;
    multiply(p, count, matrix.dtype);
    if (!call.best) return;
    const unsigned slices = blocks(desc.vocab_size, kSlice);
    launch(*device, dim3(static_cast<unsigned>(count), slices), 32, best_shared(static_cast<int>(slices)),
           tinyloop::gpu::best,
           Best{call.rows, p.list, logits_.as<float>(), desc.vocab_size, static_cast<int>(slices), call.best,
                found_.as<tl_rank>(), arrived_.as<int>(), best_.as<tl_rank>()});
}

// To the host what these rows want, the first ones of logits_ and best_; both ends move on.
void tl_model::fetch(const Call& call, const tl_row* const* rows, int count, float*& logits, tl_rank*& best) {
    const size_t vocab = static_cast<size_t>(desc.vocab_size), stride = static_cast<size_t>(call.best);
    std::vector<tl_rank> ranks(static_cast<size_t>(count) * stride);
    if (stride) device->download(ranks.data(), best_.as<void>(), sizeof(tl_rank) * ranks.size());
    for (int i = 0; i < count;) {
        if (rows[i]->best) {
            best = std::copy_n(ranks.data() + static_cast<size_t>(i) * stride, rows[i]->best, best);
            ++i;
            continue;
        }
        const int begin = i;
        while (i < count && !rows[i]->best) ++i;
        const size_t floats = static_cast<size_t>(i - begin) * vocab;
        device->download(logits, logits_.as<float>() + static_cast<size_t>(begin) * vocab, sizeof(float) * floats);
        logits += floats;
    }
}

// ---------------------------------------------------------------- products

Residual tl_model::residual(const Memory& x, const Taken& taken) const {
    return {taken.kind, x.as<float>(), taken.out, taken.norm};
}

Product tl_model::product(const Call& call, const ListPlan& list, int step, const Matrix& matrix) const {
    Product p{};
    p.shape = shape_;
    p.rows = call.rows;
    p.list = list_of(call, list, step);
    p.weights = matrix.memory.as<void>();
    p.inputs = matrix.inputs;
    p.stride = matrix.stride;
    p.outputs = matrix.outputs;
    p.prepared = prepared_.as<float>();
    p.prepared_width = padded(std::max(desc.d_model, weights_.inject.inputs), 4);
    return p;
}

void tl_model::multiply(const Product& p, int rows, int dtype) {
    if (rows) launch_product(*device, p, rows, dtype);
}
