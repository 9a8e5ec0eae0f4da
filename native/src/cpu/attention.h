// How a stack of layers shares out its attention, worked out once per plan (forward.h): the same for every layer, and
// without effect on the bits, whatever the number of threads (spans.h).
#pragma once
#include <cstdint>
#include <vector>

#include "cache.h"
#include "memory.h"
#include "spans.h"
#include "tinyloop/backend.h"

namespace tinyloop::cpu {

// Query rows of consecutive rows of a plan that attend to the same cache and visit. A query row is one of the heads
// that share a key head, of one row: number m * heads + h is head h of row first_row + m.
struct AttentionJob {
    int cache;
    int first_row;
    int first_query, queries;
    int first_span, spans;  // those that any of them sees
    int parts;              // tasks per key head
    int partials;           // with several parts: where its partials begin, in query rows, and its countdowns
    int countdowns;
};

struct AttentionTask {
    int job;
    int first_head, heads;  // key heads
    int first_span, spans;
    int64_t work;  // multiply-adds
};

struct AttentionTasks {
    std::vector<AttentionJob> jobs;
    std::vector<AttentionTask> tasks;  // the longest first
    // Parts left, per key head of a job in parts; whoever takes one to 0 folds the partials.
    mutable std::vector<int32_t> countdowns;
};

// The slots that a row sees, numbered as if its ancestors in a draft tree followed each other: first .. last - 1.
struct Seen {
    int first, last;
};
inline Seen seen_by(const tl_row& row, const tl_cache& cache) {
    return {cache.first_seen(row.slot), row.base + __builtin_popcountll(row.tree)};
}
// The slot that has number i.
int slot_seen(const tl_row& row, int i);
// Whether its ancestors do not follow each other.
inline bool has_gaps(const tl_row& row) { return row.tree & (row.tree + 1); }

// One thread's work space for one task.
class AttentionSpace {
  public:
    static constexpr int kProjectedSlots = 64;           // stored inputs that are projected at a time
    static constexpr int kGatheredPanels = 64 / 16 + 1;  // what a row's ancestors in a draft tree can touch

    // For jobs of up to so many query rows; inputs: of caches that hold a layer's inputs, else 0.
    void reserve(int queries, int head_dim, int inputs);
    size_t bytes() const { return memory_.bytes(); }

    float *q, *q_step;  // (queries, head_dim), (queries)
    int16_t* q_int;     // (queries, head_dim)
    float* sums;        // (queries, partial_floats)
    float* partials;    // (kAttendRows, partial_floats)
    char* scratch;      // of the kernel
    char* gathered;     // kGatheredPanels panels: keys, values, scales
    float* projected;   // (kSpan / 16, head_dim, 16): keys
    float* heads;       // (kSpan, 2 * head_dim): keys and values as they are projected
    float* inputs;      // (kProjectedSlots, inputs)

  private:
    Buffer memory_;
};

}  // namespace tinyloop::cpu
