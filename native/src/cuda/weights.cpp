#include "weights.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/kernels.h"

namespace tinyloop::gpu {
namespace {

constexpr size_t kUploadBytes = 8 << 20;  // of a matrix, put in order on the host at a time

float element(const tl_tensor& tensor, size_t index) {
    if (tensor.dtype == TL_F32) return static_cast<const float*>(tensor.data)[index];
    const uint16_t raw = static_cast<const uint16_t*>(tensor.data)[index];
    return tensor.dtype == TL_F16 ? cpu::half_to_float(raw) : cpu::bfloat_to_float(raw);
}

// Where element i of heads of `head_dim` lies when every head is padded to 16; head_dim 0: there are no heads.
size_t spread(int i, int head_dim) {
    return static_cast<size_t>(head_dim ? i / head_dim * cpu::pad16(head_dim) + i % head_dim : i);
}

struct Source {  // a matrix of the artifact, and the heads its rows or columns are made of (0: none)
    const tl_tensor* tensor;
    int row_head, col_head;

    size_t at(int row, int col) const {
        if (tensor->layout == TL_ROWS) return static_cast<size_t>(row) * tensor->cols + col;
        const size_t inputs = spread(tensor->cols - 1, col_head) + 1, r = spread(row, row_head);
        return (r / 16 * inputs + spread(col, col_head)) * 16 + r % 16;
    }
};

void check_type(const tl_tensor& tensor) {
    if (tensor.dtype != TL_F32 && tensor.dtype != TL_F16 && tensor.dtype != TL_BF16)
        throw Unavailable("weights: the artifact's are integers, and this device takes f32, fp16 and bf16");
}

// Writes an element in another type, or as it is.
void put(const tl_tensor& tensor, size_t index, int dtype, char* to) {
    if (tensor.dtype == dtype) {
        const size_t size = dtype == TL_F32 ? 4 : 2;
        std::memcpy(to, static_cast<const char*>(tensor.data) + index * size, size);
        return;
    }
    const float value = element(tensor, index);
    const uint16_t half = dtype == TL_F16 ? cpu::float_to_half(value) : cpu::float_to_bfloat(value);
    if (dtype == TL_F32)
        std::memcpy(to, &value, 4);
    else
        std::memcpy(to, &half, 2);
}

// Matrices below each other as one. With TL_AS_STORED they keep their element type when they share it; else all become
// floats.
Matrix matrix_of(Device& device, int wanted, const std::vector<Source>& sources) {
    Matrix out;
    if (!sources[0].tensor->data) return out;
    out.dtype = sources[0].tensor->dtype;
    out.inputs = sources[0].tensor->cols;
    out.stride = (out.inputs + 7) / 8 * 8;
    for (const Source& source : sources) {
        check_type(*source.tensor);
        out.outputs += source.tensor->rows;
        if (source.tensor->dtype != out.dtype) out.dtype = TL_F32;
    }
    if (wanted != TL_AS_STORED) out.dtype = wanted;
    const size_t size = out.dtype == TL_F32 ? 4 : 2, row_bytes = static_cast<size_t>(out.stride) * size;
    out.memory = Memory(device, row_bytes * static_cast<size_t>(out.outputs));
    const int at_once = static_cast<int>(std::max<size_t>(1, kUploadBytes / row_bytes));
    std::vector<char> rows;
    char* to = out.memory.as<char>();
    for (const Source& source : sources)
        for (int begin = 0; begin < source.tensor->rows; begin += at_once) {
            const int count = std::min(at_once, source.tensor->rows - begin);
            rows.assign(row_bytes * static_cast<size_t>(count), 0);
            for (int row = 0; row < count; ++row)
                for (int col = 0; col < out.inputs; ++col) {
                    put(*source.tensor, source.at(begin + row, col), out.dtype,
                        rows.data() + row_bytes * static_cast<size_t>(row) + size * static_cast<size_t>(col));
                }
            device.upload(to, rows.data(), rows.size());
            device.wait();  // the rows' memory is used again
            to += rows.size();
        }
    return out;
}

Matrix matrix_of(Device& device, int wanted, const tl_tensor& tensor, int col_head = 0) {
    return matrix_of(device, wanted, std::vector<Source>{{&tensor, 0, col_head}});
}

Memory vector_of(Device& device, const tl_tensor& tensor) {
    if (!tensor.data) return {};
    check_type(tensor);
    std::vector<float> values;
    for (int i = 0; i < tensor.rows * tensor.cols; ++i) values.push_back(element(tensor, static_cast<size_t>(i)));
    Memory out(device, values.size() * sizeof(float));
    device.upload(out.as<void>(), values.data(), out.bytes());
    device.wait();
    return out;
}

Layer layer_of(Device& device, int wanted, const tl_layer& source, int head_dim) {
    Layer out;
    out.attn_norm = vector_of(device, source.attn_norm);
    out.attn_post_norm = vector_of(device, source.attn_post_norm);
    out.ffn_norm = vector_of(device, source.ffn_norm);
    out.ffn_post_norm = vector_of(device, source.ffn_post_norm);
    out.q_bias = vector_of(device, source.q_bias);
    out.k_bias = vector_of(device, source.k_bias);
    out.v_bias = vector_of(device, source.v_bias);
    out.q_norm = vector_of(device, source.q_norm);
    out.k_norm = vector_of(device, source.k_norm);
    out.qkv =
        matrix_of(device, wanted, {{&source.wq, head_dim, 0}, {&source.wk, head_dim, 0}, {&source.wv, head_dim, 0}});
    out.wo = matrix_of(device, wanted, source.wo, head_dim);
    out.gate_up = matrix_of(device, wanted, {{&source.w_gate, 0, 0}, {&source.w_up, 0, 0}});
    out.down = matrix_of(device, wanted, source.w_down);
    return out;
}

}  // namespace

Weights::Weights(Device& device, const tl_model_desc& desc, int wanted)
    : embed(matrix_of(device, wanted, desc.embed)),
      head(matrix_of(device, wanted, desc.head)),
      inject(matrix_of(device, wanted, desc.inject)),
      loop_norm(vector_of(device, desc.loop_norm)),
      core_norm(vector_of(device, desc.core_norm)),
      final_norm(vector_of(device, desc.final_norm)),
      exit_gate(vector_of(device, desc.exit_gate)),
      exit_gate_bias(vector_of(device, desc.exit_gate_bias)) {
    const int count = desc.n_prelude + desc.n_core + desc.n_coda;
    for (int i = 0; i < count; ++i) layers.push_back(layer_of(device, wanted, desc.layers[i], desc.head_dim));
}

}  // namespace tinyloop::gpu
