#include "weights.h"

#include <algorithm>
#include <initializer_list>

#include "pack.h"

namespace tinyloop::cpu {
namespace {

static_assert(kInt8Weights == TL_INT8 && kInt4Weights == TL_INT4);

size_t element_bytes(int dtype) { return dtype == TL_F32 ? 4 : dtype == TL_F16 || dtype == TL_BF16 ? 2 : 1; }

bool is_integer(int dtype) { return dtype == TL_INT8 || dtype == TL_INT4; }

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

// Tensors that share a matrix share its element type: their own when they agree, else floats, which hold both exactly.
int common_dtype(std::initializer_list<tl_tensor> tensors) {
    const int first = tensors.begin()->dtype;
    for (const tl_tensor& t : tensors)
        if (t.dtype != first) return TL_F32;
    return first;
}

// Fills matrices of one model alike.
struct Filler {
    int dtype;
    const Kernels& kernels;
    Pool& pool;

    Matrix matrix(int outputs, int inputs, std::initializer_list<tl_tensor> tensors) const {
        return {outputs, inputs, dtype == TL_AS_STORED ? common_dtype(tensors) : dtype};
    }
    void fill(Matrix& to, const tl_tensor& from, int first_output, int row_head_dim, int col_head_dim) const {
        to.fill(from, first_output, row_head_dim, col_head_dim, kernels, pool);
    }
    Matrix matrix_of(const tl_tensor& source, int col_head_dim = 0) const {
        if (!source.data) return {};
        const int outputs = pad16(source.rows), inputs = spread(source.cols - 1, col_head_dim) + 1;
        if (source.layout == TL_PANELS) return from_panels(outputs, inputs, source);
        Matrix out = matrix(outputs, inputs, {source});
        fill(out, source, 0, 0, col_head_dim);
        return out;
    }
    // In place, unless other weights are asked for. Integers stay what they are: they are as small as they get.
    Matrix from_panels(int outputs, int inputs, const tl_tensor& first) const {
        Matrix stored(outputs, inputs, first.dtype, first.data);
        if (dtype == TL_AS_STORED || dtype == first.dtype || stored.integers()) return stored;
        Matrix out(outputs, inputs, dtype);
        out.fill(stored, pool);
        return out;
    }
    // Queries, keys and values as one matrix.
    Matrix joined(const tl_layer& layer, const tl_model_desc& desc) const {
        const int hd = desc.head_dim, q = desc.n_heads * pad16(hd), kv = desc.n_kv_heads * pad16(hd);
        if (layer.wq.layout == TL_PANELS) return from_panels(q + 2 * kv, desc.d_model, layer.wq);
        Matrix out = matrix(q + 2 * kv, desc.d_model, {layer.wq, layer.wk, layer.wv});
        fill(out, layer.wq, 0, hd, 0);
        fill(out, layer.wk, q, hd, 0);
        fill(out, layer.wv, q + kv, hd, 0);
        return out;
    }
};

LayerWeights layer_of(const tl_layer& source, const tl_model_desc& desc, const Filler& filler) {
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
    out.qkv = filler.joined(source, desc);
    // The last head's padding is at the end of the inputs, where it can be left out: it would only add zeros.
    out.wo = filler.matrix_of(source.wo, hd);
    out.w_gate = filler.matrix_of(source.w_gate);
    out.w_up = filler.matrix_of(source.w_up);
    out.w_down = filler.matrix_of(source.w_down);
    return out;
}

}  // namespace

Matrix::Matrix(int outputs, int inputs, int dtype) : Matrix(outputs, inputs, dtype, nullptr) {
    storage_ = Buffer(bytes());
    panels_ = storage_.as<unsigned char>();
}

Matrix::Matrix(int outputs, int inputs, int dtype, const void* panels)
    : outputs_(outputs),
      inputs_(is_integer(dtype) ? pad32(inputs) : inputs),
      dtype_(dtype),
      panel_elements_(dtype == TL_INT8   ? int8_panel_bytes(inputs_)
                      : dtype == TL_INT4 ? int4_panel_bytes(inputs_)
                                         : static_cast<size_t>(inputs_) * kPanel),
      panels_(static_cast<const unsigned char*>(panels)) {}

size_t Matrix::panel_bytes() const { return panel_elements_ * element_bytes(dtype_); }

const unsigned char* Matrix::panel(int output) const {
    return panels_ + static_cast<size_t>(output / kPanel) * panel_bytes();
}

unsigned char* Matrix::own_panel(int output) {
    return storage_.as<unsigned char>() + static_cast<size_t>(output / kPanel) * panel_bytes();
}

void Matrix::row(int output, float* weights) const {
    const int j = output % kPanel;
    if (dtype_ == TL_INT8) return unpack_int8(panel(output), j, inputs_, weights);
    if (dtype_ == TL_INT4) return unpack_int4(panel(output), j, inputs_, weights);
    const tl_tensor whole{panel(output), dtype_, kPanel, inputs_, TL_ROWS};
    for (int k = 0; k < inputs_; ++k) weights[k] = element(whole, static_cast<size_t>(k) * kPanel + j);
}

void Matrix::copy_element(int output, int input, const char* row, int col) {
    const size_t at = static_cast<size_t>(input) * kPanel + output % kPanel, index = static_cast<size_t>(col);
    if (dtype_ == TL_F32)
        reinterpret_cast<uint32_t*>(own_panel(output))[at] = reinterpret_cast<const uint32_t*>(row)[index];
    else
        reinterpret_cast<uint16_t*>(own_panel(output))[at] = reinterpret_cast<const uint16_t*>(row)[index];
}

void Matrix::set_row(int output, const float* weights) {
    const int j = output % kPanel;
    if (dtype_ == TL_INT8) return pack_int8(weights, inputs_, own_panel(output), j);
    if (dtype_ == TL_INT4) return pack_int4(weights, inputs_, own_panel(output), j);
    for (int k = 0; k < inputs_; ++k) {
        const size_t at = static_cast<size_t>(k) * kPanel + j;
        if (dtype_ == TL_F32)
            reinterpret_cast<float*>(own_panel(output))[at] = weights[k];
        else
            reinterpret_cast<uint16_t*>(own_panel(output))[at] =
                dtype_ == TL_F16 ? float_to_half(weights[k]) : float_to_bfloat(weights[k]);
    }
}

void Matrix::fill(const Matrix& source, Pool& pool) {
    pool.run([&](int id) {
        const int begin = static_cast<int>(int64_t(outputs_) * id / pool.threads());
        const int end = static_cast<int>(int64_t(outputs_) * (id + 1) / pool.threads());
        std::vector<float> weights(static_cast<size_t>(std::max(inputs_, source.inputs_)));
        for (int output = begin; output < end; ++output) {
            source.row(output, weights.data());
            set_row(output, weights.data());
        }
    });
}

void Matrix::fill(const tl_tensor& source, int first_output, int row_head_dim, int col_head_dim, const Kernels& kernels,
                  Pool& pool) {
    pool.run([&](int id) {
        const int begin = static_cast<int>(int64_t(source.rows) * id / pool.threads());
        const int end = static_cast<int>(int64_t(source.rows) * (id + 1) / pool.threads());
        const size_t row_bytes = static_cast<size_t>(source.cols) * element_bytes(source.dtype);
        const int run = col_head_dim ? col_head_dim : source.cols;
        const bool as_it_is = source.dtype == dtype_;
        std::vector<float> weights(inputs_);
        for (int row = begin; row < end; ++row) {
            const char* from = static_cast<const char*>(source.data) + static_cast<size_t>(row) * row_bytes;
            const int output = first_output + spread(row, row_head_dim);
            if (as_it_is) {
                for (int col = 0; col < source.cols; ++col) copy_element(output, spread(col, col_head_dim), from, col);
                continue;
            }
            for (int col = 0; col < source.cols; col += run)
                kernels.to_floats(from + static_cast<size_t>(col) * element_bytes(source.dtype), source.dtype, run,
                                  weights.data() + spread(col, col_head_dim));
            set_row(output, weights.data());
        }
    });
}

Weights::Weights(const tl_model_desc& desc, int dtype, const Kernels& kernels, Pool& pool)
    : loop_norm(vector_of(desc.loop_norm)),
      core_norm(vector_of(desc.core_norm)),
      final_norm(vector_of(desc.final_norm)),
      exit_gate(vector_of({desc.exit_gate.data, desc.exit_gate.dtype, desc.exit_gate.cols, 1, TL_ROWS})),
      exit_gate_bias(vector_of(desc.exit_gate_bias)) {
    const Filler filler{dtype, kernels, pool};
    // Four bits at the ends cost more than their bytes are worth: SmolLM2 loses 0.28 nats a token with these in int8
    // and 0.41 without, the demo model 0.017 and 0.025.
    const Filler ends{dtype == TL_INT4 ? TL_INT8 : dtype, kernels, pool};
    embed = ends.matrix_of(desc.embed);
    head = ends.matrix_of(desc.head);
    inject = filler.matrix_of(desc.inject);
    const int count = desc.n_prelude + desc.n_core + desc.n_coda;
    for (int i = 0; i < count; ++i) layers.push_back(layer_of(desc.layers[i], desc, filler));
}

bool Weights::integers() const {
    bool any = inject.integers() || head_matrix().integers();
    for (const LayerWeights& l : layers)
        any = any || l.qkv.integers() || l.wo.integers() || l.w_gate.integers() || l.w_up.integers() ||
              l.w_down.integers();
    return any;
}

size_t Weights::bytes() const {
    size_t total = embed.bytes() + head.bytes() + inject.bytes();
    for (const LayerWeights& l : layers)
        total += l.qkv.bytes() + l.wo.bytes() + l.w_gate.bytes() + l.w_up.bytes() + l.w_down.bytes();
    return total;
}

}  // namespace tinyloop::cpu
