#include "plan.h"

#include <algorithm>
#include <cstring>

namespace tinyloop::gpu {
namespace {

bool is_plain(const tl_row& row) { return (row.tree & (row.tree + 1)) == 0; }

}  // namespace

Plan::Plan(const Limits& limits, tl_cache* const* caches, const tl_row* rows, int n_rows, int padded_rows)
    : limits_(limits), caches_(caches), padded_(padded_rows), rows_(rows, rows + n_rows) {
    int steps = 0;
    for (tl_row& row : rows_) {
        const tl_cache& cache = *caches[row.cache];
        const bool inputs = cache.mode >= TL_CACHE_H_FP16;
        row.cache = view_of(row.cache, inputs ? row.loop_begin : 0);
        if (inputs) {  // slots that a row can see or fill
            const int high =
                cache.window ? cache.capacity : std::max(row.slot + 1, row.base + 64 - __builtin_clzll(row.tree | 1));
            int& slots = views_[static_cast<size_t>(row.cache)].projected_slots;
            slots = std::max(slots, std::min(high, cache.capacity));
        }
        steps = std::max(steps, row.loop_end - row.loop_begin);
        positions = std::max(positions, row.position + 1);
        keeps_states = keeps_states || (row.state >= 0 && !(row.flags & TL_ROW_KEEP_STATE));
        holds_inputs = holds_inputs || inputs;
        appends_kv = appends_kv || !inputs;
        adaptive = adaptive || row.exit_threshold > 0;
        resumes = resumes || row.loop_begin > 0;
        if (row.flags & TL_ROW_LOGITS) most_best = std::max(most_best, row.best);
    }
    for (const CacheView& view : views_) {
        projected_at_.push_back(projected_floats);
        projected_floats +=
            static_cast<size_t>(view.projected_slots) * static_cast<size_t>(limits.planes * limits.head_dim);
    }
    all = list([](const tl_row&) { return true; });
    fresh = list([](const tl_row& row) { return row.loop_begin == 0; });
    for (int step = 0; step < steps; ++step)
        core.push_back(list([step](const tl_row& row) { return row.loop_begin + step < row.loop_end; }));
    coda = list([](const tl_row& row) { return (row.flags & (TL_ROW_CODA | TL_ROW_LOGITS)) != 0; });
    head = list([](const tl_row& row) { return (row.flags & TL_ROW_LOGITS) != 0; });
    lay_out();
}

int Plan::view_of(int cache, int loop_begin) {
    const auto [found, is_new] = view_numbers_.try_emplace({cache, loop_begin}, static_cast<int>(views_.size()));
    if (is_new) views_.push_back(caches_[cache]->view());
    return found->second;
}

// The rows that `wanted` picks, in their order. Equal lists are one.
template <class Wanted>
ListPlan Plan::list(Wanted wanted) {
    std::vector<int32_t> picked;
    for (size_t i = 0; i < rows_.size(); ++i)
        if (wanted(rows_[i])) picked.push_back(static_cast<int32_t>(i));
    if (!picked.empty()) picked.resize(std::max(picked.size(), static_cast<size_t>(padded_)), -1);
    for (const auto* before : {&all, &fresh, core.empty() ? &all : &core.back()})
        if (before->count == static_cast<int>(picked.size()) &&
            std::equal(picked.begin(), picked.end(), entries_.begin() + static_cast<std::ptrdiff_t>(before->entries)))
            return *before;
    ListPlan plan;
    plan.entries = entries_.size();
    plan.count = static_cast<int>(picked.size());
    entries_.insert(entries_.end(), picked.begin(), picked.end());
    group(plan);
    cut_tiles(plan);
    return plan;
}

void Plan::group(ListPlan& plan) {
    plan.groups = groups_.size();
    const tl_row* last = nullptr;
    for (int i = 0; i < plan.count; ++i) {
        const int32_t entry = entries_[plan.entries + static_cast<size_t>(i)];
        if (entry < 0) break;
        const tl_row& row = rows_[static_cast<size_t>(entry)];
        plan.longest = std::max(plan.longest, row.base + __builtin_popcountll(row.tree));
        const bool joins = last && last->cache == row.cache && last->loop_begin == row.loop_begin && is_plain(*last) &&
                           is_plain(row) && groups_.back().count < limits_.group_rows;
        if (joins)
            ++groups_.back().count;
        else
            groups_.push_back({i, 1});
        last = &row;
    }
    if (plan.count) groups_.resize(std::max(groups_.size(), plan.groups + static_cast<size_t>(padded_)), {0, 0});
    plan.n_groups = static_cast<int>(groups_.size() - plan.groups);
}

// The stored slots that the list's rows attend to.
void Plan::cut_tiles(ListPlan& plan) {
    plan.tiles = tiles_.size();
    std::vector<bool> taken(views_.size());
    for (int i = 0; i < plan.count; ++i) {
        const int32_t entry = entries_[plan.entries + static_cast<size_t>(i)];
        if (entry < 0) break;
        const tl_row& row = rows_[static_cast<size_t>(entry)];
        const int slots = views_[static_cast<size_t>(row.cache)].projected_slots;
        if (taken[static_cast<size_t>(row.cache)]) continue;
        taken[static_cast<size_t>(row.cache)] = true;
        for (int first = 0; first < slots; first += limits_.tile_slots)
            tiles_.push_back({row.cache, first, std::min(limits_.tile_slots, slots - first), row.loop_begin});
    }
    plan.n_tiles = static_cast<int>(tiles_.size() - plan.tiles);
}

void Plan::lay_out() {
    const size_t rows = std::max(rows_.size(), static_cast<size_t>(padded_));
    const size_t views = std::max(views_.size(), static_cast<size_t>(padded_));
    const auto place = [this](size_t count, size_t size) {
        const size_t at = bytes_;
        bytes_ = (at + count * size + 15) / 16 * 16;
        return at;
    };
    place(rows, sizeof(tl_row));
    views_at_ = place(views, sizeof(CacheView));
    entries_at_ = place(entries_.size(), sizeof(int32_t));
    groups_at_ = place(groups_.size(), sizeof(Group));
    tiles_at_ = place(tiles_.size(), sizeof(SlotTile));
}

std::vector<char> Plan::table(float* projected) {
    for (size_t i = 0; i < views_.size(); ++i)
        if (views_[i].projected_slots) views_[i].projected = projected + projected_at_[i];
    std::vector<char> out(bytes_);
    const auto write = [&out](size_t at, const auto& list) {
        if (!list.empty()) std::memcpy(out.data() + at, list.data(), list.size() * sizeof list[0]);
    };
    write(rows_at(), rows_);
    write(views_at_, views_);
    write(entries_at_, entries_);
    write(groups_at_, groups_);
    write(tiles_at_, tiles_);
    return out;
}

bool repeats(tl_cache* const* caches, const tl_row* rows, int n_rows) {
    return std::all_of(rows, rows + n_rows, [&](const tl_row& row) {
        return row.loop_begin == 0 && row.loop_end == rows[0].loop_end && row.state < 0 && row.flags == TL_ROW_LOGITS &&
               caches[row.cache]->mode < TL_CACHE_H_FP16;
    });
}

}  // namespace tinyloop::gpu
