// Exact fp16 <-> fp32 conversion without hardware support (IEEE 754-2019, binary16).
#include <cstring>

#include "kernels.h"

namespace tinyloop::cpu {

float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 0x1F, fraction = half & 0x3FF;
    uint32_t bits;
    if (exponent == 0) {
        const float tiny = static_cast<float>(fraction) * 0x1p-24f;  // zero and subnormals, exactly
        std::memcpy(&bits, &tiny, 4);
        bits |= sign;
    } else if (exponent == 31) {
        bits = sign | 0x7F800000 | fraction << 13;
    } else {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint16_t float_to_half(float value) {
    value = value > -65504.0f ? value : -65504.0f;  // NaN becomes -65504, as in the vector kernels
    value = value < 65504.0f ? value : 65504.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits < 0x38800000) {  // below 2^-14: a multiple of 2^-24; adding 0.5 lets the FPU round to one
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        const float shifted = magnitude + 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &shifted, 4);
        return static_cast<uint16_t>(sign | (rounded - 0x3F000000));
    }
    const uint32_t rounded = bits + 0xFFF + (bits >> 13 & 1) - 0x38000000;
    return static_cast<uint16_t>(sign | rounded >> 13);
}

}  // namespace tinyloop::cpu
