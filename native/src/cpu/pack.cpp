#include "pack.h"

#include <cmath>
#include <cstring>

namespace tinyloop::cpu {
namespace {

// Where input k of output j is in a panel of bytes, and in a group of halves of bytes (and how far up).
size_t byte_at(int k, int j) { return (static_cast<size_t>(k / 4) * kPanel + j) * 4 + k % 4; }
size_t half_at(int k, int j) { return (static_cast<size_t>(k / 8) * kPanel + j) * 4 + k % 4; }
int half_shift(int k) { return k / 4 % 2 * 4; }

constexpr uint16_t kHalfNaN = 0x7E00;

int nearest(float x, int low, int high) {
    const int q = static_cast<int>(std::nearbyint(x));
    return q < low ? low : q > high ? high : q;
}

// The weight of largest magnitude, NaN when one is not finite.
float extreme(const float* weights, int n) {
    float best = 0;
    for (int k = 0; k < n; ++k) {
        if (!std::isfinite(weights[k])) return std::nanf("");
        if (std::fabs(weights[k]) > std::fabs(best)) best = weights[k];
    }
    return best;
}

}  // namespace

void pack_int8(const float* weights, int inputs, unsigned char* panel, int j) {
    const float scale = std::fabs(extreme(weights, inputs)) / 127.0f;
    std::memcpy(panel + static_cast<size_t>(inputs) * kPanel + static_cast<size_t>(j) * 4, &scale, 4);
    if (!(scale > 0)) return;
    for (int k = 0; k < inputs; ++k)
        panel[byte_at(k, j)] = static_cast<unsigned char>(nearest(weights[k] / scale, -127, 127));
}

void unpack_int8(const unsigned char* panel, int j, int inputs, float* weights) {
    float scale;
    std::memcpy(&scale, panel + static_cast<size_t>(inputs) * kPanel + static_cast<size_t>(j) * 4, 4);
    for (int k = 0; k < inputs; ++k)
        weights[k] = static_cast<float>(static_cast<signed char>(panel[byte_at(k, j)])) * scale;
}

// The extreme weight becomes -8, which uses all 16 values.
void pack_int4(const float* weights, int inputs, unsigned char* panel, int j) {
    for (int begin = 0; begin < inputs; begin += kGroup, panel += kGroupBytes) {
        const float top = extreme(weights + begin, kGroup);
        const uint16_t half = std::isnan(top) ? kHalfNaN : float_to_half(top / -8.0f);
        const float scale = half_to_float(half);
        std::memcpy(panel + kGroup * kPanel / 2 + j * 2, &half, 2);
        for (int k = 0; k < kGroup; ++k) {
            const int q = scale > 0 || scale < 0 ? nearest(weights[begin + k] / scale, -8, 7) : 0;
            panel[half_at(k, j)] |= static_cast<unsigned char>((q + 8) << half_shift(k));
        }
    }
}

void unpack_int4(const unsigned char* panel, int j, int inputs, float* weights) {
    for (int begin = 0; begin < inputs; begin += kGroup, panel += kGroupBytes) {
        uint16_t half;
        std::memcpy(&half, panel + kGroup * kPanel / 2 + j * 2, 2);
        for (int k = 0; k < kGroup; ++k)
            weights[begin + k] =
                static_cast<float>((panel[half_at(k, j)] >> half_shift(k) & 15) - 8) * half_to_float(half);
    }
}

}  // namespace tinyloop::cpu
