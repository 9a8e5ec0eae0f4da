// The first tokens of a row of logits, in rank, where a backend has picked them out (backend.h). What a sampler keeps
// of them are the tokens that it would keep of the whole LogitRow, in the same blocks: so are the sums, to the last
// bit.
#pragma once
#include <vector>

#include "logit_row.h"

namespace tinyloop {

class RankedRow {
  public:
    // Reads the `count` first, best first; the last may be none (their id is -1).
    void read(const Rank* first, int count);

    float top() const { return top_; }      // -infinity: no token has a logit
    int32_t best() const { return best_; }  // the first in rank, or -1

    // The `count`-th in rank (from 1), if it ranks up to `least`; else `least`.
    Rank nth(int count, const Rank& least) const;

    // As LogitRow's.
    template <class F>
    void each_block(const Rank& last, F f) const {
        int32_t ids[kBlock];
        float values[kBlock];
        for (size_t i = 0; i < by_id_.size();) {
            const int block = by_id_[i].id / kBlock;
            if (const int kept = gather(block, last, ids, values)) f(ids, values, kept);
            while (i < by_id_.size() && by_id_[i].id / kBlock == block) ++i;
        }
    }
    int gather(int block, const Rank& last, int32_t* ids, float* values) const;

  private:
    float top_ = 0;
    int32_t best_ = -1;
    std::vector<Rank> ranks_, by_id_;  // the same tokens
};

}  // namespace tinyloop
