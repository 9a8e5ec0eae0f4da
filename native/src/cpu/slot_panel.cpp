#include "slot_panel.h"

namespace tinyloop::cpu {
namespace {

template <class T>
void copy_elements(int dtype, int head_dim, const SlotPanel& from, int from_slot, const SlotPanel& to, int to_slot) {
    const T *from_keys = reinterpret_cast<const T*>(from.keys), *from_values = reinterpret_cast<const T*>(from.values);
    T *keys = reinterpret_cast<T*>(to.keys), *values = reinterpret_cast<T*>(to.values);
    for (int k = 0; k < head_dim; ++k) {
        keys[key_at(dtype, to_slot, k)] = from_keys[key_at(dtype, from_slot, k)];
        values[value_at(dtype, to_slot, k)] = from_values[value_at(dtype, from_slot, k)];
    }
}

}  // namespace

void copy_slot(int dtype, int head_dim, const SlotPanel& from, int from_slot, const SlotPanel& to, int to_slot) {
    if (dtype != kInt8) return copy_elements<uint16_t>(dtype, head_dim, from, from_slot, to, to_slot);
    copy_elements<int8_t>(dtype, head_dim, from, from_slot, to, to_slot);
    to.key_scales[to_slot] = from.key_scales[from_slot];
    to.value_scales[to_slot] = from.value_scales[from_slot];
}

}  // namespace tinyloop::cpu
