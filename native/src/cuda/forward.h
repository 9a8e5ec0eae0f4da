// The forward pass: which kernels run, in what order, on what. Five launches a layer: heads (norm, queries, keys,
// values, rotary embedding, cache), attention, its output, the gated block, its output; one more where a cache holds
// inputs, for their keys and values. Sums that would need all blocks to wait are left pending (call.h, Residual).
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <tuple>

#include "plan.h"
#include "weights.h"

namespace tinyloop::gpu {
struct Product;
}

struct tl_model {
    tl_model(const tl_model_desc& desc, const tl_options& options);
    ~tl_model();

    void forward(tl_cache* const* caches, tl_states* states, const tl_row* rows, int n_rows, float* logits,
                 tl_rank* best, int32_t* loops_run);
    uint64_t bytes() const { return device->held(tinyloop::gpu::Use::model); }

    const std::shared_ptr<tinyloop::gpu::Device> device;
    const tl_model_desc desc;  // the tensors' pointers are not used after construction
    const int max_rows;
    std::atomic<uint64_t> steps{0};

  private:
    struct Taken {  // what x is still to take in (call.h, Residual)
        int kind;
        const float *out, *norm;
    };
    struct Call {
        const tinyloop::gpu::Plan* plan;
        tl_states* states;
        tinyloop::gpu::Rows rows;
        int row_count;  // with padding
        int best;       // pairs that a row of best_ has; 0: every row wants all logits
        bool again;     // a decode step that may run as a graph
        Taken pending;
    };
    using GraphShape = std::tuple<int, int, int, int, bool>;  // padded rows, loops, splits, best, may rows stop early
    struct Recorded {
        void* graph = nullptr;
        uint64_t steps = 0;
        bool wanted = false;  // its shape came before
    };

    void prepare(const Call& call, const tinyloop::gpu::Plan& plan);
    void reserve(tinyloop::gpu::Memory& memory, size_t bytes);
    void forget_graphs();
    void run_again(Call& call, int loops);

    void work(Call& call);
    void embed(Call& call);
    void settle(Call& call, const tinyloop::gpu::ListPlan& list, int step, const tinyloop::gpu::Memory& norm,
                bool begins_core);
    void inject(Call& call, const tinyloop::gpu::ListPlan& list, int step);
    void layer(Call& call, const tinyloop::gpu::ListPlan& list, int step, int index, tinyloop::gpu::Visits visits);
    void attention(Call& call, const tinyloop::gpu::ListPlan& list, int step, tinyloop::gpu::Visits visits);
    void head(Call& call, int first, int count);
    void fetch(const Call& call, const tl_row* const* rows, int count, float*& logits, tl_rank*& best);

    tinyloop::gpu::List list_of(const Call& call, const tinyloop::gpu::ListPlan& list, int step) const;
    tinyloop::gpu::Residual residual(const tinyloop::gpu::Memory& x, const Taken& taken) const;
    tinyloop::gpu::Product product(const Call& call, const tinyloop::gpu::ListPlan& list, int step,
                                   const tinyloop::gpu::Matrix& matrix) const;
    void multiply(const tinyloop::gpu::Product& product, int rows, int dtype);
    int splits_of(const Call& call, const tinyloop::gpu::ListPlan& list) const;
    size_t partial_bytes(int rows, int splits) const;

    tinyloop::gpu::Shape shape_;
    tinyloop::gpu::Limits limits_;
    int heads_per_block_, blocks_per_key_head_;
    tinyloop::gpu::Weights weights_;
    tinyloop::gpu::Memory x_, y_, e_, before_, out_;              // (max_rows, width); y_ is x between a layer's halves
    tinyloop::gpu::Memory queries_, attended_, gated_;            // (max_rows, n_heads * head_dim), (max_rows, d_ffn)
    tinyloop::gpu::Memory prepared_;                              // (max_rows, inputs): of a product with many rows
    tinyloop::gpu::Memory logits_, best_, found_;                 // (kLogitRows, vocab_size); best.h
    tinyloop::gpu::Memory loops_run_, stayed_, arrived_;          // per row; per attention block
    tinyloop::gpu::Memory table_, angles_, partial_, projected_;  // grow on demand
    std::map<GraphShape, Recorded> graphs_;
    bool records_graphs_ = true;
};
