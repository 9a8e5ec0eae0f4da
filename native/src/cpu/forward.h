// The CPU backend's forward pass. All threads run it together (pool.h): each phase shares out rows or panels, and a
// barrier stands between a phase and the one that reads its results.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "cache.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "tinyloop/backend.h"
#include "weights.h"

namespace tinyloop::cpu {

inline constexpr int kScoreRows = 32;  // (row, query head) pairs that one attention task handles

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
    struct Group {  // consecutive rows of one plan with the same cache and loop: they read the same keys
        int begin, count;
    };
    struct Plan {                    // the rows that run a stack of layers together
        std::vector<int32_t> rows;   // row numbers of the call
        std::vector<int32_t> loops;  // per row: the core iteration, 0 elsewhere
        std::vector<Group> groups;
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
        bool adaptive = false;           // some row may stop looping early
        std::vector<int32_t> loops_run;  // per row
        std::vector<uint8_t> left;       // per row: has stopped looping early
        std::vector<float> stayed;       // per row: the exit gate's probability of not having stopped yet
    };

    template <class Wanted>
    Plan plan(const Call& call, int step, Wanted wanted) const;
    void work(Call& call, int id);
    void embed(const Call& call, int id);
    void begin_core(const Call& call, int id);
    void inject(const Plan& plan, int id);
    void layer(const Call& call, const Plan& plan, int index, Visits visits, int id);
    void position_and_append(const Call& call, const Plan& plan, const tinyloop::cpu::LayerWeights& w, Visits visits,
                             int id);
    void residual(const Plan& plan, const tinyloop::cpu::Vector& post_norm, int id);
    void normed_input(const Plan& plan, const tinyloop::cpu::Vector& norm, int id);
    void project(const tinyloop::cpu::Matrix& w, const tinyloop::cpu::Activations& a, const Plan& plan, float* c,
                 int ldc, bool to_x, int id);
    void norm_in_place(const Plan& plan, const tinyloop::cpu::Vector& weight, int id);
    void remember(const Plan& plan, int id);
    void leave_early(Call& call, size_t step, int id);
    bool settled(Call& call, int row) const;
    void save_states(const Call& call, int id);
    void head(const Call& call, int id);

    // attention.cpp
    struct Window;
    void attention(const Call& call, const Plan& plan, const tinyloop::cpu::LayerWeights& w, Visits visits, int id);
    void attend(const Call& call, const Plan& plan, const Group& group, const tinyloop::cpu::LayerWeights& w, int visit,
                int kv_head, int id);
    void project_inputs(const tl_cache& cache, const Window& window, const tinyloop::cpu::LayerWeights& w, int visit,
                        int kv_head, int id);
    float soften(const tl_cache& cache, const Window& window, const tl_row& row, int visit, int kv_head,
                 float* scores) const;
    void rotate(float* head, int position) const;
    void reserve_attention(const Call& call);

    tinyloop::cpu::Pool pool_;
    tinyloop::cpu::Weights weights_;
    const int max_rows_;
    const int ldx_, head_dim_, ldq_, lda_, ldf_;  // row strides, padded to 16; head_dim_ padded too
    tinyloop::cpu::Buffer x_, e_, before_, normed_, pair_, qkv_, attended_, gate_, up_, out_,
        logits_;                                  // (max_rows, stride)
    std::vector<float> angles_;                   // (positions so far, head_dim / 2) pairs of cos, sin
    std::vector<tinyloop::cpu::Buffer> scratch_;  // per thread, for products
    std::vector<tinyloop::cpu::Buffer> scores_;   // per thread, (kScoreRows, longest cache)
    std::vector<tinyloop::cpu::Buffer>
        projected_;  // per thread, keys and values of one head, for caches that hold inputs
};

// The rows of a call that `wanted(row, number)` picks, at their loop of `step`.
template <class Wanted>
tl_model::Plan tl_model::plan(const Call& call, int step, Wanted wanted) const {
    const int most = std::max(1, tinyloop::cpu::kScoreRows / (desc.n_heads / desc.n_kv_heads));
    Plan out;
    for (int i = 0; i < call.n_rows; ++i) {
        const tl_row& row = call.rows[i];
        if (!wanted(row, i)) continue;
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
