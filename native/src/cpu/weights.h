// A model's tensors in the layout of the kernels: matrices as panels, vectors as floats padded to 16.
// Heads are padded to a multiple of 16 dimensions with zeros; no kernel then needs a tail.
#pragma once
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "tinyloop/backend.h"

namespace tinyloop::cpu {

// (outputs, inputs) in panels, see kernels.h. outputs is a multiple of 16; of integer weights inputs is one of 32. The
// panels are its own, or lie in memory that outlives it: an artifact's, shared by all processes that map the file.
class Matrix {
  public:
    Matrix() = default;
    Matrix(int outputs, int inputs, int dtype);  // dtype: as in Panels
    Matrix(int outputs, int inputs, int dtype, const void* panels);

    int outputs() const { return outputs_; }
    int inputs() const { return inputs_; }
    int panels() const { return outputs_ / kPanel; }
    bool integers() const { return dtype_ == kInt8Weights || dtype_ == kInt4Weights; }
    size_t bytes() const { return static_cast<size_t>(panels()) * panel_bytes(); }
    Panels view() const { return {panels_, dtype_, inputs_, panel_elements_, panels()}; }
    void row(int output, float* weights) const;  // (inputs)

    // Stores `source` in the outputs from `first_output` on. head_dim > 0 spreads heads of that many rows (columns) to
    // multiples of 16.
    void fill(const tl_tensor& source, int first_output, int row_head_dim, int col_head_dim, const Kernels& kernels,
              Pool& pool);
    // Stores what another matrix of the same size holds, in this one's type.
    void fill(const Matrix& source, Pool& pool);

  private:
    size_t panel_bytes() const;
    const unsigned char* panel(int output) const;
    unsigned char* own_panel(int output);
    void copy_element(int output, int input, const char* row, int col);  // of the same type
    void set_row(int output, const float* weights);

    int outputs_ = 0, inputs_ = 0, dtype_ = 0;
    size_t panel_elements_ = 0;
    Buffer storage_;
    const unsigned char* panels_ = nullptr;
};

using Vector = std::vector<float>;  // padded to a multiple of 16 with zeros; empty = the model has none

struct LayerWeights {
    Vector attn_norm, attn_post_norm, ffn_norm, ffn_post_norm;  // (d_model)
    Vector q_bias, k_bias, v_bias;                              // (heads, padded head_dim)
    Vector q_norm, k_norm;                                      // (head_dim)
    Matrix qkv;                                                 // (q heads + 2 kv heads, each padded; d_model)
    Matrix wo;                                                  // (d_model; q heads, padded)
    Matrix w_gate, w_up;                                        // (d_ffn, d_model)
    Matrix w_down;                                              // (d_model, d_ffn)
};

struct Weights {
    // dtype: what the matrices are stored in, a tl_dtype, or TL_AS_STORED.
    Weights(const tl_model_desc& desc, int dtype, const Kernels& kernels, Pool& pool);

    const Matrix& head_matrix() const { return head.outputs() ? head : embed; }
    bool integers() const;  // whether some product reads quantised rows
    size_t bytes() const;

    std::vector<LayerWeights> layers;  // prelude, core, coda
    Matrix embed, head, inject;        // head is empty when tied
    Vector loop_norm, core_norm, final_norm;
    Vector exit_gate, exit_gate_bias;  // (d_model), (1)
};

}  // namespace tinyloop::cpu
