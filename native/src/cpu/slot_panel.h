// Where the elements of one slot lie in a panel of 16 (spans.h), for whoever writes or moves single slots.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "tinyloop/backend.h"

namespace tinyloop::cpu {

inline constexpr size_t cached_bytes(int dtype) { return dtype == TL_F32 ? 4 : dtype == kInt8 ? 1 : 2; }

// Of dimension k of the slot's key, in elements from the panel's first.
inline constexpr size_t key_at(int dtype, int slot, int k) {
    return static_cast<size_t>(dtype == kInt8 ? k / 2 * 2 * kPanel + 2 * slot + k % 2 : k * kPanel + slot);
}
// Of dimension k of the slot's value; not for TL_F32.
inline constexpr size_t value_at(int dtype, int slot, int k) {
    return static_cast<size_t>(k / kPanel * kPanel * kPanel + (dtype == kInt8
                                                                   ? slot / 2 * 2 * kPanel + k % kPanel * 2 + slot % 2
                                                                   : slot * kPanel + k % kPanel));
}

// Copies a slot's key and value, with int8 their scales. fp16 and int8 panels only.
void copy_slot(int dtype, int head_dim, const SlotPanel& from, int from_slot, const SlotPanel& to, int to_slot);

}  // namespace tinyloop::cpu
