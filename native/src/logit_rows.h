// What a forward pass leaves of its rows' logits: as much as each row asks for (backend.h, tl_row.best).
#pragma once
#include <vector>

#include "logit_row.h"

namespace tinyloop {

// Where a row's logits are; of several rows, where those of the first one are and the others' follow.
struct RowLogits {
    float* whole = nullptr;  // (vocab_size), where count is 0
    Rank* first = nullptr;   // (count), best first
    int count = 0;

    // Leaves the token behind all others.
    void drop(int32_t token) const;
};

class LogitRows {
  public:
    // Room for those of `rows` that want logits.
    LogitRows(int vocab_size, const std::vector<tl_row>& rows);
    LogitRows(const LogitRows&) = delete;
    LogitRows& operator=(const LogitRows&) = delete;

    // Of the i-th one.
    const RowLogits& operator[](size_t i) const { return rows_[i]; }
    RowLogits all() { return {whole_.data(), first_.data(), 0}; }

  private:
    std::vector<float> whole_;
    std::vector<Rank> first_;
    std::vector<RowLogits> rows_;
};

}  // namespace tinyloop
