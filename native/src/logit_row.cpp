#include "logit_row.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

namespace tinyloop {
namespace {

constexpr int kGroups = 16;  // of a block; one is a lane of the vectorised pass
constexpr float kNone = -std::numeric_limits<float>::infinity();

// The k-th largest value; fewer than k: -infinity. Reorders them.
float kth_largest(std::vector<float>& values, size_t k) {
    if (values.size() < k) return kNone;
    const auto at = values.begin() + static_cast<std::ptrdiff_t>(k) - 1;
    std::nth_element(values.begin(), at, values.end(), std::greater<>());
    return *at;
}

}  // namespace

void weigh(const float* logits, int count, double top, double temperature, double* weights) {
    const double inverse = 1 / temperature;
    constexpr double kMagic = 0x1.8p52;  // added and taken away, it rounds to an integer, which is in the low bits
    for (int i = 0; i < count; ++i) {
        const double x = (logits[i] - top) * inverse;
        const double t = x * 1.4426950408889634 + kMagic, n = t - kMagic;
        const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;  // |r| <= ln(2) / 2
        // e^r by its series, in a tree: a chain of twelve steps would wait for each.
        const double r2 = r * r, r4 = r2 * r2;
        const double low = (1 + r) + (1.0 / 2 + r * (1.0 / 6)) * r2;
        const double middle = (1.0 / 24 + r * (1.0 / 120)) + (1.0 / 720 + r * (1.0 / 5040)) * r2;
        const double high = (1.0 / 40320 + r * (1.0 / 362880)) + (1.0 / 3628800 + r * (1.0 / 39916800)) * r2;
        const double p = low + (middle + (high + r4 * (1.0 / 479001600)) * r4) * r4;
        weights[i] = std::bit_cast<double>(std::bit_cast<uint64_t>(p) + (std::bit_cast<uint64_t>(t) << 52));
    }
}

double sum(const double* weights, int count) {
    double part[4] = {0, 0, 0, 0};
    int i = 0;
    for (; i + 4 <= count; i += 4)
        for (int j = 0; j < 4; ++j) part[j] += weights[i + j];
    for (int j = 0; i + j < count; ++j) part[j] += weights[i + j];
    return (part[0] + part[2]) + (part[1] + part[3]);
}

void LogitRow::read(const float* logits, int count) {
    logits_ = logits;
    count_ = count;
    const size_t blocks = (static_cast<size_t>(count) + kBlock - 1) / kBlock;
    group_tops_.resize(blocks * kGroups);
    block_tops_.resize(blocks);
    top_ = kNone;
    for (size_t block = 0; block < blocks; ++block) {
        const float* from = logits + block * kBlock;
        const int here = std::min(kBlock, count - static_cast<int>(block) * kBlock);
        float tops[kGroups];
        std::fill_n(tops, kGroups, kNone);
        int i = 0;
        for (; i + kGroups <= here; i += kGroups)
            for (int j = 0; j < kGroups; ++j) tops[j] = from[i + j] > tops[j] ? from[i + j] : tops[j];
        for (int j = 0; i + j < here; ++j) tops[j] = std::max(tops[j], from[i + j]);
        std::copy_n(tops, kGroups, group_tops_.data() + block * kGroups);
        for (int width = kGroups / 2; width > 0; width /= 2)
            for (int j = 0; j < width; ++j) tops[j] = std::max(tops[j], tops[j + width]);
        block_tops_[block] = tops[0];
        top_ = std::max(top_, tops[0]);
    }
    best_ = -1;
    for (size_t block = 0; best_ < 0 && top_ != kNone; ++block)
        if (block_tops_[block] == top_)
            best_ = static_cast<int32_t>(std::find(logits + block * kBlock, logits + count, top_) - logits);
}

int LogitRow::gather(int block, const Rank& last, int32_t* ids, float* values) const {
    const int begin = block * kBlock, end = std::min(count_, begin + kBlock);
    const float least = last.logit;
    int kept = 0;
    for (int row = begin; row < end; row += kGroups) {
        const float* from = logits_ + row;
        const int here = std::min(kGroups, end - row);
        int reaching = 0;
        if (here == kGroups)
            for (int j = 0; j < kGroups; ++j) reaching += from[j] >= least;
        else
            for (int j = 0; j < here; ++j) reaching += from[j] >= least;
        if (reaching == here) {  // mostly all or none
            for (int j = 0; j < here; ++j) {
                ids[kept] = row + j;
                values[kept++] = from[j];
            }
        } else if (reaching > 0) {
            for (int j = 0; j < here; ++j) {  // without a branch
                ids[kept] = row + j;
                values[kept] = from[j];
                kept += from[j] >= least;
            }
        }
    }
    if (last.id >= end) return kept;
    int reached = 0;
    for (int i = 0; i < kept; ++i) {
        ids[reached] = ids[i];
        values[reached] = values[i];
        reached += values[i] > last.logit || ids[i] <= last.id;
    }
    return reached;
}

// Leaves in chosen_ the `count` first in rank, if there are so many, and not many more.
void LogitRow::choose(int count, float floor) {
    // The count-th largest of the blocks' tops is no more than the count-th largest logit, and the same holds for the
    // groups of the blocks that reach it.
    const size_t k = static_cast<size_t>(count);
    tops_ = block_tops_;
    const float bound = std::max(floor, kth_largest(tops_, k));
    tops_.clear();
    for (const float top : group_tops_)
        if (top >= bound) tops_.push_back(top);
    chosen_.clear();
    each_block({std::max(bound, kth_largest(tops_, k)), count_},
               [this](const int32_t* ids, const float* logits, int n) {
                   for (int i = 0; i < n; ++i) chosen_.push_back({logits[i], ids[i]});
               });
}

Rank LogitRow::nth(int count, const Rank& least) {
    choose(count, least.logit);
    if (chosen_.size() < static_cast<size_t>(count)) return least;
    const auto at = chosen_.begin() + count - 1;
    std::nth_element(chosen_.begin(), at, chosen_.end(), before);
    return *at;
}

std::vector<Rank> LogitRow::first(int count) {
    choose(count, kNone);
    const auto end = chosen_.begin() + std::min(count, static_cast<int>(chosen_.size()));
    std::partial_sort(chosen_.begin(), end, chosen_.end(), before);
    return {chosen_.begin(), end};
}

}  // namespace tinyloop
