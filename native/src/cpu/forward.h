// The CPU backend's forward pass. All threads run it together (pool.h): each phase shares out rows or panels, and a
// barrier stands between a phase and the one that reads its results.
#pragma once
#include <atomic>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "tinyloop/backend.h"
#include "weights.h"

struct tl_cache {
    tl_cache(const tl_model_desc& desc, const tl_cache_desc& shape);
    static uint64_t bytes(const tl_model_desc& desc, const tl_cache_desc& shape);

    // Slots: prelude layers, coda layers, then (loop, core layer).
    uint16_t* keys(int slot, int kv_head) const;    // [positions/16][head_dim][16]
    uint16_t* values(int slot, int kv_head) const;  // [head_dim/16][positions][16]

    const int positions;  // padded to 16
    const int head_dim;   // padded to 16
    const int n_kv_heads;
    const int loops;
    tinyloop::cpu::Buffer storage;
};

struct tl_states {
    tl_states(int count, int stride);
    const int count;
    const int stride;                     // floats per vector
    tinyloop::cpu::Buffer core, prelude;  // (count, stride)
};

struct tl_model {
    tl_model(const tl_model_desc& desc, const tl_options& options);

    void forward(tl_cache* const* caches, tl_states* states, const tl_row* rows, int n_rows, float* logits);
    uint64_t bytes() const;

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
    struct Call {
        tl_cache* const* caches;
        tl_states* states;
        const tl_row* rows;
        int n_rows;
        float* logits;
        Plan fresh;              // start at the embedding
        std::vector<Plan> core;  // per step
        Plan coda, head;
    };

    Plan plan(const Call& call, int step, bool (*wanted)(const tl_row&, int step)) const;
    void work(const Call& call, int id);
    void embed(const Call& call, int id);
    void begin_core(const Call& call, int id);
    void inject(const Plan& plan, int id);
    void layer(const Call& call, const Plan& plan, int index, int slot, int slot_per_loop, int id);
    void attention(const Call& call, const Plan& plan, int slot, int slot_per_loop, int id);
    void attend(const Call& call, const Plan& plan, const Group& group, int slot, int kv_head, int id);
    void position_and_append(const Call& call, const Plan& plan, const tinyloop::cpu::LayerWeights& w, int slot,
                             int slot_per_loop, int id);
    void residual(const Plan& plan, const tinyloop::cpu::Vector& post_norm, int id);
    void normed_input(const Plan& plan, const tinyloop::cpu::Vector& norm, int id);
    void project(const tinyloop::cpu::Matrix& w, const float* a, int lda, const Plan& plan, float* c, int ldc,
                 bool to_x, int id);
    void norm_in_place(const Plan& plan, const tinyloop::cpu::Vector& weight, int id);
    void save_states(const Call& call, int id);
    void head(const Call& call, int id);
    void rotate(float* head, const float* angles) const;

    tinyloop::cpu::Pool pool_;
    tinyloop::cpu::Weights weights_;
    const int max_rows_;
    const int ldx_, head_dim_, ldq_, lda_, ldf_;  // row strides, padded to 16; head_dim_ padded too
    tinyloop::cpu::Buffer x_, e_, normed_, pair_, qkv_, attended_, gate_, up_, out_, angles_,
        logits_;                                  // (max_rows, stride)
    std::vector<tinyloop::cpu::Buffer> scratch_;  // per thread, for products
    std::vector<tinyloop::cpu::Buffer> scores_;   // per thread, (kScoreRows, longest cache)
};
