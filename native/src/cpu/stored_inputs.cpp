// Caches that hold a layer's inputs: keys and values are projected from them when they are attended to.
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "forward.h"
#include "slot_panel.h"

using namespace tinyloop::cpu;

// Keys and values of one head for slots[seen.first .. seen.last), into the thread's space: keys in panels of 16 slots,
// values by slot, those that fill up the last panel zero.
void tl_model::project_inputs(const tl_cache& cache, const LayerWeights& w, int visit, int kv_head,
                              const int32_t* slots, Seen seen, int id) {
    AttentionSpace& space = spaces_[id];
    const int hd = desc.head_dim, ldi = pad32(desc.d_model), ldh = 2 * head_dim_;
    const int panels = head_dim_ / kPanel, first_key = (desc.n_heads + kv_head) * panels,
              first_value = (desc.n_heads + desc.n_kv_heads + kv_head) * panels;
    const Panels all = w.qkv.view();
    for (int i = seen.first / kPanel * kPanel; i < seen.last; i += AttentionSpace::kProjectedSlots) {
        const int count = std::min(AttentionSpace::kProjectedSlots, seen.last - i);
        for (int j = 0; j < count; ++j) {
            float* const input = space.inputs + static_cast<size_t>(j) * ldi;
            restore(cache.stored(), cache.input(visit, slots[i + j]), desc.d_model, input);
            std::fill(input + desc.d_model, input + ldi, 0.0f);  // another call's space may have lain here
            if (integers_) stored_rows_[id].set(j, input, desc.d_model, *kernels);
        }
        const Activations rows = integers_ ? stored_rows_[id].with(space.inputs, ldi) : Activations{space.inputs, ldi};
        float* const heads = space.heads + static_cast<size_t>(i) * ldh;
        kernels->product(all, rows, count, heads - first_key * kPanel, ldh, nullptr, Put::store, first_key,
                         first_key + panels, scratch_[id].as<float>());
        kernels->product(all, rows, count, heads + head_dim_ - first_value * kPanel, ldh, nullptr, Put::store,
                         first_value, first_value + panels, scratch_[id].as<float>());
        for (int j = 0; j < count; ++j) {
            float* const key = heads + static_cast<size_t>(j) * ldh;
            float* const value = key + head_dim_;
            if (!w.k_bias.empty()) kernels->add(w.k_bias.data() + static_cast<size_t>(kv_head) * head_dim_, hd, key);
            if (!w.v_bias.empty()) kernels->add(w.v_bias.data() + static_cast<size_t>(kv_head) * head_dim_, hd, value);
            if (!w.k_norm.empty()) kernels->rmsnorm(key, w.k_norm.data(), desc.norm_eps, hd, key);
            rotate(key, cache.position(slots[i + j]));
            float* const panel = space.projected + static_cast<size_t>((i + j) / kPanel) * kPanel * head_dim_;
            for (int k = 0; k < head_dim_; ++k) panel[key_at(TL_F32, (i + j) % kPanel, k)] = key[k];
        }
    }
    const int end = pad16(seen.last);
    std::memset(space.heads + static_cast<size_t>(seen.last) * ldh, 0,
                static_cast<size_t>(end - seen.last) * ldh * sizeof(float));
}
