// plan_round on the CPU. One pass over the requests; a row no request owns stays skipped.
#include "carryover_kernels/ops.h"
#include "../common/arguments.h"

#include <algorithm>

namespace carryover_kernels {

std::tuple<Tensor, Tensor, Tensor, Tensor> cpu::plan_round(
    Tensor query_start_loc, Tensor num_rejected, Tensor positions, Tensor slot_mapping, Tensor carry_slot_ids, Tensor carry_lens,
    int64_t carry_capacity, std::optional<Tensor> carry_positions) {
  check_plan_round(
      query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions);

  const int64_t rows = positions.size(0), requests = num_rejected.size(0), slots = carry_lens.size(0);
  Tensor row_cache_slot = torch::stable::new_empty(positions, {rows});
  Tensor row_carry_slot = torch::stable::new_empty(positions, {rows});
  Tensor row_position = torch::stable::new_empty(positions, {rows});
  Tensor block_start = torch::stable::new_empty(positions, {requests});

  const auto* starts = data<const int32_t>(query_start_loc);
  const auto* rejected = data<const int32_t>(num_rejected);
  const auto* position = data<const int64_t>(positions);
  const auto* slot = data<const int64_t>(slot_mapping);
  const auto* carry_slot = data<const int32_t>(carry_slot_ids);
  auto* lens = data<int32_t>(carry_lens);
  auto* carried_at = data<int64_t>(carry_positions);
  auto* cache_out = data<int64_t>(row_cache_slot);
  auto* carry_out = data<int64_t>(row_carry_slot);
  auto* position_out = data<int64_t>(row_position);
  auto* start_out = data<int64_t>(block_start);

  std::fill_n(cache_out, rows, int64_t{-1});
  std::fill_n(carry_out, rows, int64_t{-1});
  std::fill_n(position_out, rows, int64_t{0});
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t first = std::clamp<int64_t>(starts[r], 0, rows);
    const int64_t last = std::clamp<int64_t>(starts[r + 1], first, rows);
    const int64_t committed_end = last - std::clamp<int64_t>(rejected[r], 0, last - first);
    for (int64_t row = first; row < committed_end; ++row) {
      if (slot[row] < 0) continue;
      cache_out[row] = slot[row];
      position_out[row] = position[row];
    }
    start_out[r] = last == first ? 0 : committed_end > first ? position[committed_end - 1] + 1 : position[first];

    const int64_t own = carry_slot[r];
    if (own < 0 || own >= slots) continue;
    const int64_t carried = std::min(last - committed_end, carry_capacity);
    for (int64_t j = 0; j < carried; ++j) {
      carry_out[committed_end + j] = own * carry_capacity + j;
      position_out[committed_end + j] = position[committed_end + j];
      if (carried_at) carried_at[own * carry_capacity + j] = position[committed_end + j];
    }
    lens[own] = static_cast<int32_t>(carried);
  }
  return {row_cache_slot, row_carry_slot, row_position, block_start};
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("plan_round", TORCH_BOX(&cpu::plan_round)); }

}  // namespace carryover_kernels
