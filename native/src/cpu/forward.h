// The CPU backend's forward pass. All threads run it together (pool.h): each phase shares out rows or panels, and a
// barrier stands between a phase and the one that reads its results. Few rows: every thread takes some panels of each
// matrix for all rows, so that weights are read once. Many rows: every thread takes some of the rows through whole
// matrices, which needs barriers only around attention.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "cache.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "tinyloop/backend.h"
#include "weights.h"

namespace tinyloop::cpu {

inline constexpr int kFewRows = 4;    // up to so many, every thread norms all rows itself: cheaper than a barrier
inline constexpr int kOwnRows = 24;   // from so many rows a thread on, rows are shared out, not panels
inline constexpr int kPartRows = 96;  // most rows that a thread takes at once: what products read of them stays near L2

struct Share {
    int begin, end;
};

// The part of 0 .. count-1 that thread `id` works on.
inline Share share(int count, int id, int threads) {
    return {static_cast<int>(int64_t(count) * id / threads), static_cast<int>(int64_t(count) * (id + 1) / threads)};
}

}  // namespace tinyloop::cpu

struct tl_model {
    tl_model(const tl_model_desc& desc, const tl_options& options);

    void forward(tl_cache* const* caches, tl_states* states, const tl_row* rows, int n_rows, float* logits,
                 int32_t* loops_run);
    uint64_t bytes() const;
    int max_rows() const { return max_rows_; }

    const tl_model_desc desc;  // the tensors' pointers are not used after construction
    const tinyloop::cpu::Kernels* kernels;
    std::atomic<uint64_t> steps{0};

  private:
    struct Plan {                    // the rows that run a stack of layers together
        std::vector<int32_t> rows;   // row numbers of the call
        std::vector<int32_t> loops;  // per row: the core iteration, 0 elsewhere
        tinyloop::cpu::AttentionTasks attention;
    };
    struct Part {  // the rows of a plan that a phase handles at once
        int first, count;
        bool alone;  // by this thread alone, all panels; else by all threads, each some panels
    };
    struct Desk {  // work space for the rows of a part, (rows, stride)
        tinyloop::cpu::Buffer normed, pair, gate, up, out;
        tinyloop::cpu::QuantizedRows quantized;  // what the next products read; empty where all weights are floats
        int turn = 0;                            // of a thread: the phases of parts so far
        size_t bytes() const {
            return normed.bytes() + pair.bytes() + gate.bytes() + up.bytes() + out.bytes() + quantized.bytes();
        }
    };
    struct Visits {  // which visit of a cache (cache.h) a layer is: first + loop * per_loop
        int first, per_loop;
        int at(int loop) const { return first + loop * per_loop; }
    };
    struct Call {
        tl_cache* const* caches;
        tl_states* states;
        const tl_row* rows;
        int n_rows;
        float* logits;
        Plan fresh;              // start at the embedding
        std::vector<Plan> core;  // per step
        Plan coda, head;
        bool appends_kv = false;         // some row's cache holds keys and values
        bool adaptive = false;           // some row may stop looping early
        std::vector<int32_t> loops_run;  // per row
        std::vector<uint8_t> left;       // per row: has stopped looping early
        std::vector<float> stayed;       // per row: the exit gate's probability of not having stopped yet
    };

    template <class Wanted>
    Plan plan(const Call& call, int step, Wanted wanted);
    void work(Call& call, int id);
    void embed(const Call& call, int id);
    void begin_core(const Call& call, int id);
    void inject(const Plan& plan, int id);
    void layer(const Call& call, const Plan& plan, int index, Visits visits, int id);
    void project_heads(const Call& call, const Plan& plan, const Part& part, const tinyloop::cpu::LayerWeights& w,
                       Visits visits, int id);
    void append(const Call& call, const Plan& plan, const Part& part, const tinyloop::cpu::LayerWeights& w,
                Visits visits, const float* normed, tinyloop::cpu::Share heads);
    void finish_layer(const Plan& plan, const Part& part, const tinyloop::cpu::LayerWeights& w, int id);
    void gated(const Part& part, const tinyloop::cpu::LayerWeights& w, const tinyloop::cpu::Activations& normed,
               Desk& desk, int id);
    void take_in(const Plan& plan, const Part& part, const tinyloop::cpu::Matrix& w,
                 const tinyloop::cpu::Activations& a, const tinyloop::cpu::Vector& post_norm, Desk& desk, int id);
    tinyloop::cpu::Activations normed(const Plan& plan, const Part& part, const tinyloop::cpu::Vector& norm, int id);
    tinyloop::cpu::Activations readied(const Part& part, const float* x, int ldx, int n, int id);

    template <class F>
    void each_part(const Plan& plan, int id, F f);
    Desk desk(int rows) const;
    Desk& desk_of(const Part& part, int id) { return part.alone ? desks_[id] : desks_.back(); }
    // Whether every thread readies the rows that its products read by itself: of few rows that is cheaper than a
    // barrier.
    bool by_itself(const Part& part) const { return part.alone || part.count <= tinyloop::cpu::kFewRows; }
    // What of `count` things a thread does of a part.
    tinyloop::cpu::Share mine(const Part& part, int count, int id) const {
        return part.alone ? tinyloop::cpu::Share{0, count} : tinyloop::cpu::share(count, id, pool_.threads());
    }
    void meet(const Part& part) {
        if (!part.alone) pool_.barrier();
    }
    float* row_of(const tinyloop::cpu::Buffer& rows, const Plan& plan, int m) const {
        return rows.as<float>() + static_cast<size_t>(plan.rows[m]) * ldx_;
    }

    void norm_in_place(const Plan& plan, const tinyloop::cpu::Vector& weight, int id);
    void remember(const Plan& plan, int id);
    void leave_early(Call& call, size_t step, int id);
    bool settled(Call& call, int row) const;
    void save_states(const Call& call, int id);
    void head(const Call& call, int id);

    // attention_tasks.cpp
    void share_attention(const Call& call, Plan& plan);
    void reserve_attention(const Call& call);

    // attention.cpp
    void attention(const Call& call, const Plan& plan, const tinyloop::cpu::LayerWeights& w, Visits visits, int id);
    void attend(const Call& call, const Plan& plan, const tinyloop::cpu::AttentionTask& task,
                const tinyloop::cpu::LayerWeights& w, int visit, int kv_head, int id);
    void fold_partials(const Call& call, const Plan& plan, const tinyloop::cpu::AttentionJob& job, int kv_head, int id);
    void take_queries(const tinyloop::cpu::AttentionJob& job, const tl_cache& cache, int kv_head, int id);
    void clear_sums(int count, float* sums) const;
    float* attended_of(const tinyloop::cpu::AttentionJob& job, int kv_head, int query) const;
    tinyloop::cpu::Span span_of(const tl_cache& cache, int visit, int kv_head, int first, tinyloop::cpu::Seen seen,
                                int id) const;
    void gather(const tl_cache& cache, int visit, int kv_head, const int32_t* slots, tinyloop::cpu::Seen seen,
                tinyloop::cpu::Span& span, int id);

    // stored_inputs.cpp
    void project_inputs(const tl_cache& cache, const tinyloop::cpu::LayerWeights& w, int visit, int kv_head,
                        const int32_t* slots, tinyloop::cpu::Seen seen, int id);

    // rotary.cpp
    void reserve_angles(int positions);
    void rotate(float* head, int position) const;

    tinyloop::cpu::Pool pool_;
    tinyloop::cpu::Weights weights_;
    const int max_rows_;
    const int ldx_, head_dim_, ldq_, lda_, ldf_, ldp_;       // row strides, padded to 16; head_dim_ padded too
    const bool integers_;                                    // some products read quantised rows
    tinyloop::cpu::Buffer x_, e_, before_, qkv_, attended_;  // (max_rows, stride); the last two by a plan's order
    tinyloop::cpu::Buffer logits_;                           // (kHeadRows, outputs of the head)
    std::vector<Desk> desks_;                                // per thread, then the team's
    std::atomic<int> next_part_[2] = {0, 0};                 // of this phase of parts and of the next one
    std::vector<float> angles_;                              // (positions so far, head_dim / 2) pairs of cos, sin
    std::vector<tinyloop::cpu::Buffer> scratch_;             // per thread, for products
    std::vector<tinyloop::cpu::AttentionSpace> spaces_;      // per thread
    std::vector<tinyloop::cpu::QuantizedRows> stored_rows_;  // per thread, of a cache that holds inputs
    tinyloop::cpu::Buffer partials_;                         // of attention jobs in parts
};

// The rows of a call that `wanted(row, number)` picks, at their loop of `step`.
template <class Wanted>
tl_model::Plan tl_model::plan(const Call& call, int step, Wanted wanted) {
    Plan out;
    for (int i = 0; i < call.n_rows; ++i) {
        if (!wanted(call.rows[i], i)) continue;
        out.rows.push_back(i);
        out.loops.push_back(call.rows[i].loop_begin + step);
    }
    share_attention(call, out);
    return out;
}

// Calls f(part) until all rows of the plan are done; all threads call it. Between two calls stands a barrier, so each
// can ready the other's counter.
template <class F>
void tl_model::each_part(const Plan& plan, int id, F f) {
    const int n = static_cast<int>(plan.rows.size()), threads = pool_.threads();
    if (n < tinyloop::cpu::kOwnRows * threads) {
        f(Part{0, n, false});
        return;
    }
    const int turn = desks_[id].turn++;
    if (id == 0) next_part_[(turn + 1) % 2].store(0, std::memory_order_relaxed);
    const int most = threads * tinyloop::cpu::kPartRows, parts = threads * ((n + most - 1) / most);
    for (int i; (i = next_part_[turn % 2].fetch_add(1, std::memory_order_relaxed)) < parts;) {
        const auto [begin, end] = tinyloop::cpu::share(n, i, parts);
        f(Part{begin, end - begin, true});
    }
}
