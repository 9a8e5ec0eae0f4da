// Weights of one output, quantised and put into its place in a panel (layouts: integer_impl.h). Compiled once for all
// SIMD levels and free of any order between outputs, so the same weights give the same bytes everywhere.
#pragma once
#include <cstddef>

#include "kernels.h"

namespace tinyloop::cpu {

constexpr size_t int8_panel_bytes(int inputs) { return static_cast<size_t>(inputs) * kPanel + kPanel * 4; }
constexpr size_t int4_panel_bytes(int inputs) { return static_cast<size_t>(inputs) / kGroup * kGroupBytes; }

// weights: (inputs), a multiple of 32; panel: zeroed where this output goes; j: the output's place among the
// panel's 16. A weight that is not finite makes its scale NaN.
void pack_int8(const float* weights, int inputs, unsigned char* panel, int j);
void pack_int4(const float* weights, int inputs, unsigned char* panel, int j);
void unpack_int8(const unsigned char* panel, int j, int inputs, float* weights);
void unpack_int4(const unsigned char* panel, int j, int inputs, float* weights);

}  // namespace tinyloop::cpu
