// plan_round: thread i places row i and, where i counts a request, finishes that request.
#pragma once

#include "rows.cuh"

namespace carryover_kernels {

struct PlanRoundParams {
  int64_t *row_cache_slot, *row_carry_slot, *row_position, *block_start, *carry_positions;
  int32_t* carry_lens;
  const int32_t *query_start_loc, *num_rejected, *carry_slot_ids;
  const int64_t *positions, *slot_mapping;
  int64_t rows, requests, slots, capacity;
};

CK_DEVICE int64_t committed_end(const PlanRoundParams& p, int64_t r, Rows own) {
  const int64_t count = own.last - own.first, rejected = p.num_rejected[r];
  return own.last - (rejected < 0 ? 0 : (rejected > count ? count : rejected));
}

CK_KERNEL void CK_BOUNDS(128, 1) plan_round_kernel(PlanRoundParams p) {
  const int64_t i = thread_index();
  if (i < p.rows) {
    int64_t cache = -1, carry = -1, position = 0;
    const int64_t r = request_of(p.query_start_loc, p.requests, i, p.rows);
    if (r >= 0) {
      const int64_t end = committed_end(p, r, rows_of(p.query_start_loc, r, p.rows)), own = p.carry_slot_ids[r], j = i - end;
      if (j < 0) {
        if (p.slot_mapping[i] >= 0) cache = p.slot_mapping[i];
      } else if (own >= 0 && own < p.slots && j < p.capacity) {
        carry = own * p.capacity + j;
        if (p.carry_positions) p.carry_positions[carry] = p.positions[i];
      }
      if (cache >= 0 || carry >= 0) position = p.positions[i];
    }
    p.row_cache_slot[i] = cache;
    p.row_carry_slot[i] = carry;
    p.row_position[i] = position;
  }
  if (i < p.requests) {
    const Rows rows = rows_of(p.query_start_loc, i, p.rows);
    const int64_t end = committed_end(p, i, rows), own = p.carry_slot_ids[i], rejected = rows.last - end;
    p.block_start[i] = rows.last == rows.first ? 0 : end > rows.first ? p.positions[end - 1] + 1 : p.positions[rows.first];
    if (own >= 0 && own < p.slots) p.carry_lens[own] = static_cast<int32_t>(rejected < p.capacity ? rejected : p.capacity);
  }
}

}  // namespace carryover_kernels
