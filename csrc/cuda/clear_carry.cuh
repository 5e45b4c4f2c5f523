// clear_carry: a thread a named slot.
#pragma once

#include "rows.cuh"

namespace carryover_kernels {

struct ClearCarryParams {
  int32_t* carry_lens;
  const int32_t* carry_slot_ids;
  int64_t requests, slots;
};

CK_KERNEL void CK_BOUNDS(128, 1) clear_carry_kernel(ClearCarryParams p) {
  const int64_t r = thread_index();
  if (r >= p.requests) return;
  const int64_t slot = p.carry_slot_ids[r];
  if (slot >= 0 && slot < p.slots) p.carry_lens[slot] = 0;
}

}  // namespace carryover_kernels
