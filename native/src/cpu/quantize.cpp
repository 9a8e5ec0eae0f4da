#include "quantize.h"

#include <cmath>
#include <cstring>

#include "kernels.h"

namespace tinyloop::cpu {
namespace {

float largest(const float* x, int n) {
    float best = 0;
    for (int i = 0; i < n; ++i) best = std::fabs(x[i]) > best ? std::fabs(x[i]) : best;
    return best < 3e38f ? best : 3e38f;
}

// Nearest integer, ties to even, within -limit .. limit; NaN becomes -limit.
int nearest(float x, float limit) {
    x = x > -limit ? x : -limit;
    x = x < limit ? x : limit;
    return static_cast<int>(std::nearbyint(x));
}

}  // namespace

size_t stored_bytes(Stored kind, int n) {
    const size_t padded = static_cast<size_t>(pad32(n));
    switch (kind) {
        case Stored::fp16:
            return padded * 2;
        case Stored::int8:
            return padded + padded / kGroup * 2;
        case Stored::int4:
            return padded / 2 + padded / kGroup * 2;
    }
    return 0;
}

void store(Stored kind, const float* x, int n, uint8_t* out) {
    if (kind == Stored::fp16) {
        for (int i = 0; i < n; ++i) {
            const uint16_t half = float_to_half(x[i]);
            std::memcpy(out + 2 * static_cast<size_t>(i), &half, 2);
        }
        return;
    }
    const float limit = kind == Stored::int8 ? 127.0f : 7.0f;
    uint8_t* scales = out + static_cast<size_t>(pad32(n)) / (kind == Stored::int8 ? 1 : 2);
    for (int begin = 0; begin < n; begin += kGroup) {
        const int count = n - begin < kGroup ? n - begin : kGroup;
        const uint16_t half = float_to_half(largest(x + begin, count) / limit);
        const float scale = half_to_float(half);
        std::memcpy(scales + begin / kGroup * 2, &half, 2);
        for (int i = 0; i < count; ++i) {
            const int q = scale > 0 ? nearest(x[begin + i] / scale, limit) : 0;
            const int at = begin + i;
            if (kind == Stored::int8) {
                out[at] = static_cast<uint8_t>(static_cast<int8_t>(q));
            } else {
                const int shift = at % 2 * 4;
                out[at / 2] = static_cast<uint8_t>((out[at / 2] & ~(15 << shift)) | (q + 8) << shift);
            }
        }
    }
}

void restore(Stored kind, const uint8_t* in, int n, float* x) {
    if (kind == Stored::fp16) {
        for (int i = 0; i < n; ++i) {
            uint16_t half;
            std::memcpy(&half, in + 2 * static_cast<size_t>(i), 2);
            x[i] = half_to_float(half);
        }
        return;
    }
    const uint8_t* scales = in + static_cast<size_t>(pad32(n)) / (kind == Stored::int8 ? 1 : 2);
    for (int i = 0; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, scales + i / kGroup * 2, 2);
        const int q = kind == Stored::int8 ? static_cast<int8_t>(in[i]) : (in[i / 2] >> (i % 2 * 4) & 15) - 8;
        x[i] = static_cast<float>(q) * half_to_float(half);
    }
}

}  // namespace tinyloop::cpu
