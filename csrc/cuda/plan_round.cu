// plan_round's door on CUDA.
#include "plan_round.cuh"

#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> plan_round(
    Tensor query_start_loc, Tensor num_rejected, Tensor positions, Tensor slot_mapping, Tensor carry_slot_ids, Tensor carry_lens,
    int64_t carry_capacity, MaybeTensor carry_positions) {
  check_plan_round(query_start_loc, num_rejected, positions, slot_mapping, carry_slot_ids, carry_lens, carry_capacity, carry_positions);
  const int64_t rows = positions.size(0), requests = num_rejected.size(0);
  Tensor row_cache_slot = torch::stable::new_empty(positions, {rows});
  Tensor row_carry_slot = torch::stable::new_empty(positions, {rows});
  Tensor row_position = torch::stable::new_empty(positions, {rows});
  Tensor block_start = torch::stable::new_empty(positions, {requests});
  const PlanRoundParams params{
      data<int64_t>(row_cache_slot), data<int64_t>(row_carry_slot), data<int64_t>(row_position), data<int64_t>(block_start),
      data<int64_t>(carry_positions), data<int32_t>(carry_lens), data<const int32_t>(query_start_loc),
      data<const int32_t>(num_rejected), data<const int32_t>(carry_slot_ids), data<const int64_t>(positions),
      data<const int64_t>(slot_mapping), rows, requests, carry_lens.size(0), carry_capacity};
  launch(plan_round_kernel, blocks_for(rows > requests ? rows : requests, 128), 128, positions, params);
  return {row_cache_slot, row_carry_slot, row_position, block_start};
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("plan_round", TORCH_BOX(&plan_round)); }

}  // namespace carryover_kernels::cuda
