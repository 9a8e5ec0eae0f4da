// Attention's unit of work: a span, 256 slots of one key head counted from slot 0 of the sequence, and the rows (query
// heads) that attend to it. What a row takes from a span is a partial result; partials are folded in the order of the
// spans. So the bits of a row depend on nothing but its own query and the slots it sees, and spans may be shared out.
//
// Layouts of 16 slots ("a panel"):
//   keys    floats and fp16 [head_dim][16], int8 [head_dim/2][16][2]: one operand per step over the dimensions
//   values  fp16 [head_dim/16][16 slots][16], int8 [head_dim/16][8 pairs of slots][16][2], floats at any strides
// int8 is multiplied as integers: queries and softmax weights are rounded to 15 bits once, and sums are exact.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tinyloop::cpu {

inline constexpr int kSpan = 256;
inline constexpr int kSpanPanels = kSpan / 16;
inline constexpr int kAttendRows = 48;  // the most rows of one kernel call

struct SlotPanel {
    char* keys;
    char* values;
    float* key_scales = nullptr;  // (16), int8 only: x = q * scale
    float* value_scales = nullptr;
};

struct Span {
    int dtype;  // TL_F32, TL_F16 or kInt8, of keys and values
    int head_dim;
    size_t value_slot,
        value_panel;  // elements from one slot's (int8: pair's) values to the next, and per 16 dimensions
    SlotPanel panels[kSpanPanels];
};

// The rows of one call. Partials are (rows, partial_floats): the sum of weights * values, the highest score, the sum of
// the weights.
struct AttendRows {
    int count;
    const float* q;        // (count, head_dim), scaled by 1 / sqrt(head_dim)
    const int16_t* q_int;  // int8 spans: (count, head_dim) rounded, and
    const float* q_step;   // (count): q = q_int * q_step
    const int32_t* begin;  // (count) the slots of the span that a row sees: 0 <= begin < end <= kSpan
    const int32_t* end;
    float* partials;
    char* scratch;  // attend_scratch bytes
};

inline constexpr size_t partial_floats(int head_dim) { return static_cast<size_t>(head_dim) + 16; }
inline constexpr float kNoScore = -3e38f;  // the highest score of a partial that no span was folded into; its rest is 0
// Scores and rounded weights of all rows, and a panel of keys or a span's 16 dimensions of values, unpacked.
inline constexpr size_t attend_scratch(int rows, int head_dim) {
    const size_t unpacked = static_cast<size_t>(head_dim > kSpan ? head_dim : kSpan) * 16 * sizeof(float);
    return static_cast<size_t>(rows) * kSpan * (sizeof(float) + sizeof(int16_t)) + unpacked;
}

}  // namespace tinyloop::cpu
