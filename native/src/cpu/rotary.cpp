// Rotary position embedding (Su et al., arXiv 2104.09864).
#include <cmath>

#include "forward.h"

void tl_model::reserve_angles(int positions) {
    const int known = static_cast<int>(angles_.size()) / desc.head_dim;
    if (positions <= known) return;
    angles_.resize(static_cast<size_t>(positions) * desc.head_dim);
    for (int p = known; p < positions; ++p)
        for (int k = 0; k < desc.head_dim / 2; ++k) {
            const double turn = p * std::pow(double(desc.rope_theta), -2.0 * k / desc.head_dim);
            angles_[static_cast<size_t>(p) * desc.head_dim + 2 * k] = static_cast<float>(std::cos(turn));
            angles_[static_cast<size_t>(p) * desc.head_dim + 2 * k + 1] = static_cast<float>(std::sin(turn));
        }
}

void tl_model::rotate(float* head, int position) const {
    const float* angles = angles_.data() + static_cast<size_t>(position) * desc.head_dim;
    const int half = desc.head_dim / 2;
    const int step = desc.rope == TL_ROPE_HALF ? 1 : 2, apart = desc.rope == TL_ROPE_HALF ? half : 1;
    for (int k = 0; k < half; ++k) {
        const float c = angles[2 * k], s = angles[2 * k + 1];
        float& a = head[k * step];
        float& b = head[k * step + apart];
        const float turned = a * c - b * s;
        b = b * c + a * s;
        a = turned;
    }
}
