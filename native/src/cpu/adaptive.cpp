// Adaptive depth: after each loop a row may stop, and the loops left out are filled in its cache.
#include <cmath>
#include <cstring>

#include "forward.h"

using namespace tinyloop::cpu;

void tl_model::remember(const Plan& plan, int id) {
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()), id, pool_.threads());
    for (int m = begin; m < end; ++m) {
        const size_t at = static_cast<size_t>(plan.rows[m]) * ldx_;
        std::memcpy(before_.as<float>() + at, x_.as<float>() + at, sizeof(float) * ldx_);
    }
    pool_.barrier();
}

// Whether the row's state says that further loops are not needed: the exit gate's cumulative probability (as in Ouro,
// arXiv 2510.25741, section on adaptive computation), or the relative change of the state.
bool tl_model::settled(Call& call, int row) const {
    const float* x = x_.as<float>() + static_cast<size_t>(row) * ldx_;
    const float threshold = call.rows[row].exit_threshold;
    if (!weights_.exit_gate.empty()) {
        const float z = kernels->dot(weights_.exit_gate.data(), x, ldx_) + weights_.exit_gate_bias[0];
        call.stayed[row] *= 1.0f - 1.0f / (1.0f + std::exp(-z));
        return 1.0f - call.stayed[row] >= threshold;
    }
    float* before = before_.as<float>() + static_cast<size_t>(row) * ldx_;
    const float old = kernels->dot(before, before, ldx_);
    for (int k = 0; k < ldx_; ++k) before[k] = x[k] - before[k];
    return kernels->dot(before, before, ldx_) < threshold * threshold * old;
}

void tl_model::leave_early(Call& call, size_t step, int id) {
    const Plan& plan = call.core[step];
    const auto [begin, end] = share(static_cast<int>(plan.rows.size()), id, pool_.threads());
    for (int m = begin; m < end; ++m) {
        const int i = plan.rows[m], loop = plan.loops[m];
        const tl_row& row = call.rows[i];
        if (row.exit_threshold <= 0 || loop + 1 >= row.loop_end || !settled(call, i)) continue;
        call.left[i] = 1;
        call.loops_run[i] = loop + 1;
        const int first = desc.n_prelude + desc.n_coda;
        for (int later = loop + 1; later < row.loop_end; ++later)
            for (int l = 0; l < desc.n_core; ++l)
                call.caches[row.cache]->copy_visit(first + later * desc.n_core + l, first + loop * desc.n_core + l,
                                                   row.slot);
    }
    pool_.barrier();
    if (id == 0 && step + 1 < call.core.size()) {
        const int next = static_cast<int>(step) + 1;
        call.core[step + 1] = this->plan(
            call, next, [&](const tl_row& r, int i) { return !call.left[i] && r.loop_begin + next < r.loop_end; });
    }
    pool_.barrier();
}
