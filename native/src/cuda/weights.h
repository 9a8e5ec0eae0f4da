// A model's tensors on the device: matrices as rows of outputs in their own element type, each row aligned to 16 bytes
// and padded with zeros to a multiple of 8 elements; vectors as floats.
#pragma once
#include <vector>

#include "device.h"
#include "tinyloop/backend.h"

namespace tinyloop::gpu {

struct Matrix {
    Memory memory;
    int outputs = 0, inputs = 0;
    int stride = 0;  // elements of a row
    int dtype = TL_F32;
    size_t row_bytes() const { return static_cast<size_t>(stride) * (dtype == TL_F32 ? 4 : 2); }
};

struct Layer {
    Memory attn_norm, attn_post_norm, ffn_norm, ffn_post_norm;  // (d_model)
    Memory q_bias, k_bias, v_bias, q_norm, k_norm;              // (heads * head_dim), (head_dim)
    Matrix qkv;                                                 // ((n_heads + 2 * n_kv_heads) * head_dim, d_model)
    Matrix wo, gate_up, down;                                   // gate_up: (2 * d_ffn, d_model)
};

struct Weights {
    // wanted: the matrices' element type, or TL_AS_STORED. Throws Unavailable for integers.
    Weights(Device& device, const tl_model_desc& desc, int wanted);
    const Matrix& head_matrix() const { return head.outputs ? head : embed; }

    std::vector<Layer> layers;   // prelude, core, coda
    Matrix embed, head, inject;  // head has no outputs when tied, inject when there is none
    Memory loop_norm, core_norm, final_norm, exit_gate, exit_gate_bias;
};

}  // namespace tinyloop::gpu
