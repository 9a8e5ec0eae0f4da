#include "weights.h"

#include <cstring>

namespace tinyloop::cpu {
namespace {

size_t element_bytes(int dtype) { return dtype == TL_F32 ? 4 : 2; }

float element(const tl_tensor& tensor, size_t index) {
    if (tensor.dtype == TL_F32) return static_cast<const float*>(tensor.data)[index];
    const uint16_t raw = static_cast<const uint16_t*>(tensor.data)[index];
    return tensor.dtype == TL_F16 ? half_to_float(raw) : bfloat_to_float(raw);
}

// Where row (or column) i of heads of `head_dim` goes when every head is padded to 16.
int spread(int i, int head_dim) { return head_dim ? i / head_dim * pad16(head_dim) + i % head_dim : i; }

Vector vector_of(const tl_tensor& source, int head_dim = 0) {
    if (!source.data) return {};
    Vector out(pad16(spread(source.rows - 1, head_dim) + 1));
    for (int i = 0; i < source.rows; ++i) out[spread(i, head_dim)] = element(source, i);
    return out;
}

Matrix matrix_of(const tl_tensor& source, Pool& pool, int col_head_dim = 0) {
    if (!source.data) return {};
    const int outputs = pad16(source.rows), inputs = spread(source.cols - 1, col_head_dim) + 1;
    if (source.layout == TL_PANELS) return {outputs, inputs, source.dtype, source.data};
    Matrix matrix(outputs, inputs, source.dtype);
    matrix.fill(source, 0, 0, col_head_dim, pool);
    return matrix;
}

// Tensors that share a matrix share its element type: their own when they agree, else floats, which hold both exactly.
int common_dtype(const tl_tensor& a, const tl_tensor& b, const tl_tensor& c) {
    return a.dtype == b.dtype && b.dtype == c.dtype ? a.dtype : TL_F32;
}

// Queries, keys and values as one matrix.
Matrix joined_of(const tl_layer& source, const tl_model_desc& desc, Pool& pool) {
    const int hd = desc.head_dim, q = desc.n_heads * pad16(hd), kv = desc.n_kv_heads * pad16(hd);
    if (source.wq.layout == TL_PANELS) return {q + 2 * kv, desc.d_model, source.wq.dtype, source.wq.data};
    Matrix matrix(q + 2 * kv, desc.d_model, common_dtype(source.wq, source.wk, source.wv));
    matrix.fill(source.wq, 0, hd, 0, pool);
    matrix.fill(source.wk, q, hd, 0, pool);
    matrix.fill(source.wv, q + kv, hd, 0, pool);
    return matrix;
}

LayerWeights layer_of(const tl_layer& source, const tl_model_desc& desc, Pool& pool) {
    const int hd = desc.head_dim;
    LayerWeights out;
    out.attn_norm = vector_of(source.attn_norm);
    out.attn_post_norm = vector_of(source.attn_post_norm);
    out.ffn_norm = vector_of(source.ffn_norm);
    out.ffn_post_norm = vector_of(source.ffn_post_norm);
    out.q_bias = vector_of(source.q_bias, hd);
    out.k_bias = vector_of(source.k_bias, hd);
    out.v_bias = vector_of(source.v_bias, hd);
    out.q_norm = vector_of(source.q_norm);
    out.k_norm = vector_of(source.k_norm);
    out.qkv = joined_of(source, desc, pool);
    // The last head's padding is at the end of the inputs, where it can be left out: it would only add zeros.
    out.wo = matrix_of(source.wo, pool, hd);
    out.w_gate = matrix_of(source.w_gate, pool);
    out.w_up = matrix_of(source.w_up, pool);
    out.w_down = matrix_of(source.w_down, pool);
    return out;
}

}  // namespace

Matrix::Matrix(int outputs, int inputs, int dtype)
    : outputs_(outputs),
      inputs_(inputs),
      dtype_(dtype),
      storage_(static_cast<size_t>(outputs) * inputs * element_bytes(dtype)),
      panels_(storage_.as<void>()) {}

Matrix::Matrix(int outputs, int inputs, int dtype, const void* panels)
    : outputs_(outputs), inputs_(inputs), dtype_(dtype), panels_(panels) {}

size_t Matrix::bytes() const { return static_cast<size_t>(outputs_) * inputs_ * element_bytes(dtype_); }

float Matrix::at(int output, int input) const {
    const tl_tensor whole{panels_, dtype_, outputs_, inputs_, TL_ROWS};
    return element(whole, (static_cast<size_t>(output / kPanel) * inputs_ + input) * kPanel + output % kPanel);
}

void Matrix::fill(const tl_tensor& source, int first_output, int row_head_dim, int col_head_dim, Pool& pool) {
    pool.run([&](int id) {
        const int begin = static_cast<int>(int64_t(source.rows) * id / pool.threads());
        const int end = static_cast<int>(int64_t(source.rows) * (id + 1) / pool.threads());
        const size_t size = element_bytes(source.dtype);
        const char* from = static_cast<const char*>(source.data);
        char* to = storage_.as<char>();
        for (int row = begin; row < end; ++row) {
            const int output = first_output + spread(row, row_head_dim);
            const size_t base = static_cast<size_t>(output / kPanel) * inputs_ * kPanel + output % kPanel;
            for (int col = 0; col < source.cols; ++col) {
                const size_t target = base + static_cast<size_t>(spread(col, col_head_dim)) * kPanel;
                const size_t index = static_cast<size_t>(row) * source.cols + col;
                if (source.dtype == dtype_)
                    std::memcpy(to + target * size, from + index * size, size);
                else
                    storage_.as<float>()[target] = element(source, index);
            }
        }
    });
}

Weights::Weights(const tl_model_desc& desc, Pool& pool)
    : embed(matrix_of(desc.embed, pool)),
      head(matrix_of(desc.head, pool)),
      inject(matrix_of(desc.inject, pool)),
      loop_norm(vector_of(desc.loop_norm)),
      core_norm(vector_of(desc.core_norm)),
      final_norm(vector_of(desc.final_norm)),
      exit_gate(vector_of({desc.exit_gate.data, desc.exit_gate.dtype, desc.exit_gate.cols, 1, TL_ROWS})),
      exit_gate_bias(vector_of(desc.exit_gate_bias)) {
    const int count = desc.n_prelude + desc.n_core + desc.n_coda;
    for (int i = 0; i < count; ++i) layers.push_back(layer_of(desc.layers[i], desc, pool));
}

size_t Weights::bytes() const {
    size_t total = embed.bytes() + head.bytes() + inject.bytes();
    for (const LayerWeights& l : layers)
        total += l.qkv.bytes() + l.wo.bytes() + l.w_gate.bytes() + l.w_up.bytes() + l.w_down.bytes();
    return total;
}

}  // namespace tinyloop::cpu
