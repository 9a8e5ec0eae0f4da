#include "ranked_row.h"

#include <algorithm>
#include <limits>

namespace tinyloop {

void RankedRow::read(const Rank* first, int count) {
    ranks_.assign(first, std::find_if(first, first + count, [](const Rank& token) { return token.id < 0; }));
    top_ = ranks_.empty() ? -std::numeric_limits<float>::infinity() : ranks_[0].logit;
    best_ = ranks_.empty() ? -1 : ranks_[0].id;
    by_id_ = ranks_;
    std::sort(by_id_.begin(), by_id_.end(), [](const Rank& a, const Rank& b) { return a.id < b.id; });
}

Rank RankedRow::nth(int count, const Rank& least) const {
    const size_t at = static_cast<size_t>(count) - 1;
    return at < ranks_.size() && !before(least, ranks_[at]) ? ranks_[at] : least;
}

int RankedRow::gather(int block, const Rank& last, int32_t* ids, float* values) const {
    const auto begin = std::lower_bound(by_id_.begin(), by_id_.end(), block * kBlock,
                                        [](const Rank& token, int32_t id) { return token.id < id; });
    int kept = 0;
    for (auto token = begin; token != by_id_.end() && token->id / kBlock == block; ++token) {
        if (before(last, *token)) continue;
        ids[kept] = token->id;
        values[kept++] = token->logit;
    }
    return kept;
}

}  // namespace tinyloop
