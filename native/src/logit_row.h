// One row of logits and the passes that sampling makes over it. None sorts the vocabulary: one pass finds the largest
// logit of small groups, and the later passes skip the blocks in which nothing can be wanted.
// The results depend on the logits alone: blocks and the order of sums are counted from token 0.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tinyloop/backend.h"

namespace tinyloop {

using Rank = tl_rank;
inline bool before(const Rank& a, const Rank& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

// Weights e^((logit - top) / temperature) of up to kBlock logits <= top, at least (top - kReach * temperature). In
// plain multiplications and additions, so that no two maths libraries can disagree on a draw.
inline constexpr int kBlock = 256;
inline constexpr double kReach = 44.36;  // e^-44.36 = 2^-64, less than the last bit of a draw
void weigh(const float* logits, int count, double top, double temperature, double* weights);
// The sum of the first `count` weights, in four interleaved parts.
double sum(const double* weights, int count);

class LogitRow {
  public:
    // Reads the row, which must stay as it is while this is used.
    void read(const float* logits, int count);

    int count() const { return count_; }
    float top() const { return top_; }      // -infinity: no token has a logit
    int32_t best() const { return best_; }  // the first in rank

    // The `count`-th in rank (from 1), if it ranks up to `least`, the last one with some logit; else `least`.
    Rank nth(int count, const Rank& least);
    // The `count` first in rank, best first, or as many as there are.
    std::vector<Rank> first(int count);

    // Calls f(ids, logits, count) for the tokens that rank up to `last`, in id order and blocks of up to kBlock.
    template <class F>
    void each_block(const Rank& last, F f) const {
        int32_t ids[kBlock];
        float values[kBlock];
        for (int block = 0; block * kBlock < count_; ++block)
            if (block_tops_[static_cast<size_t>(block)] >= last.logit)
                if (const int kept = gather(block, last, ids, values)) f(ids, values, kept);
    }
    // Those of one block (tokens block * kBlock on); returns how many.
    int gather(int block, const Rank& last, int32_t* ids, float* values) const;

  private:
    void choose(int count, float floor);

    const float* logits_ = nullptr;
    int count_ = 0;
    float top_ = 0;
    int32_t best_ = -1;
    std::vector<float> group_tops_;  // (blocks, 16): of every 16th token of the block
    std::vector<float> block_tops_;  // (blocks)
    std::vector<float> tops_;        // work space
    std::vector<Rank> chosen_;       // work space
};

}  // namespace tinyloop
