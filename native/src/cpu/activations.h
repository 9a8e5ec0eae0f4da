// Rows quantised for the products of integer weights: made once where a row is made, read by every product after it.
#pragma once
#include "kernels.h"
#include "memory.h"

namespace tinyloop::cpu {

class QuantizedRows {
  public:
    QuantizedRows() = default;
    QuantizedRows(int rows, int width)
        : ldq_(pad32(width)),
          ldg_(ldq_ / kGroup),
          q_(static_cast<size_t>(rows) * ldq_),
          scales_(sizeof(float) * static_cast<size_t>(rows) * ldg_),
          offsets_(sizeof(int16_t) * static_cast<size_t>(rows) * ldg_ * 2) {}

    // x: n true elements, padded with zeros to 16.
    void set(int row, const float* x, int n, const Kernels& kernels) {
        const size_t group = static_cast<size_t>(row) * ldg_;
        kernels.quantize(x, n, q_.as<int8_t>() + static_cast<size_t>(row) * ldq_, scales_.as<float>() + group,
                         offsets_.as<int16_t>() + group * 2);
    }
    // The rows as products take them; x: the same rows as floats.
    Activations with(const float* x, int ldx) const {
        return {x, ldx, q_.as<int8_t>(), ldq_, scales_.as<float>(), offsets_.as<int16_t>(), ldg_};
    }
    size_t bytes() const { return q_.bytes() + scales_.bytes() + offsets_.bytes(); }

  private:
    int ldq_ = 0, ldg_ = 0;
    Buffer q_, scales_, offsets_;
};

}  // namespace tinyloop::cpu
