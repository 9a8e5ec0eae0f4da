// What a call's rows become on the host before kernels run: which rows run together in each part of the model, which of
// them share keys, and the one table of all this that is sent to the device. Starts no kernel.
#pragma once
#include <map>
#include <vector>

#include "cache.h"

namespace tinyloop::gpu {

struct ListPlan {  // offsets count elements of their own array in the table
    size_t entries = 0, groups = 0, tiles = 0;
    int count = 0, n_groups = 0, n_tiles = 0;
    int longest = 0;  // the most that a row sees
};

struct Limits {      // of a model, that a plan follows
    int group_rows;  // rows of one attention block
    int tile_slots;  // stored slots of one product block
    int planes;      // 2 * n_kv_heads
    int head_dim;
};

class Plan {
  public:
    // `padded` > n_rows: every list gets so many entries and groups, so that a graph fits (see repeats()).
    Plan(const Limits& limits, tl_cache* const* caches, const tl_row* rows, int n_rows, int padded_rows = 0);

    ListPlan all, fresh, coda, head;
    std::vector<ListPlan> core;  // per step
    bool keeps_states = false, holds_inputs = false, appends_kv = false, adaptive = false, resumes = false;
    int positions = 0;            // one more than the highest
    int most_best = 0;            // that a row wants
    size_t projected_floats = 0;  // work space for keys and values of stored inputs

    // The table: rows, views, entries, groups, tiles, each aligned. `projected` is that work space.
    std::vector<char> table(float* projected);
    size_t rows_at() const { return 0; }
    size_t views_at() const { return views_at_; }
    size_t entries_at() const { return entries_at_; }
    size_t groups_at() const { return groups_at_; }
    size_t tiles_at() const { return tiles_at_; }
    size_t bytes() const { return bytes_; }

  private:
    template <class Wanted>
    ListPlan list(Wanted wanted);
    void group(ListPlan& plan);
    void cut_tiles(ListPlan& plan);
    int view_of(int cache, int loop_begin);
    void lay_out();

    const Limits limits_;
    tl_cache* const* caches_;
    const int padded_;
    std::vector<tl_row> rows_;  // their `cache` counts views_
    std::vector<CacheView> views_;
    std::vector<size_t> projected_at_;  // per view
    std::map<std::pair<int, int>, int> view_numbers_;
    std::vector<int32_t> entries_;
    std::vector<Group> groups_;
    std::vector<SlotTile> tiles_;
    size_t views_at_ = 0, entries_at_ = 0, groups_at_ = 0, tiles_at_ = 0, bytes_ = 0;
};

// Whether the rows are a decode step that will come again with other tokens: one loop count from the embedding to the
// logits, nothing saved, no stored inputs.
bool repeats(tl_cache* const* caches, const tl_row* rows, int n_rows);

}  // namespace tinyloop::gpu
