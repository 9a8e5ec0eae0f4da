#include "logit_rows.h"

#include <algorithm>

namespace tinyloop {

constexpr float kLeast = -3e38f;

void RowLogits::drop(int32_t token) const {
    if (count == 0) {
        whole[token] = kLeast;
        return;
    }
    Rank* const end = first + count;
    Rank* const at = std::find_if(first, end, [token](const Rank& rank) { return rank.id == token; });
    if (at == end) return;
    std::move(at + 1, end, at);
    end[-1] = {kLeast, token};
}

LogitRows::LogitRows(int vocab_size, const std::vector<tl_row>& rows) {
    size_t whole = 0, first = 0;
    for (const tl_row& row : rows) {
        if (!(row.flags & TL_ROW_LOGITS)) continue;
        (row.best ? first : whole) += static_cast<size_t>(row.best ? row.best : vocab_size);
    }
    whole_.resize(whole);
    first_.resize(first);
    RowLogits next = all();
    for (const tl_row& row : rows) {
        if (!(row.flags & TL_ROW_LOGITS)) continue;
        rows_.push_back({next.whole, next.first, row.best});
        if (row.best)
            next.first += row.best;
        else
            next.whole += vocab_size;
    }
}

}  // namespace tinyloop
