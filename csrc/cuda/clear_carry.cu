// clear_carry's door on CUDA.
#include "clear_carry.cuh"

#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

void clear_carry(Tensor carry_slot_ids, Tensor carry_lens) {
  check_clear_carry(carry_slot_ids, carry_lens);
  const int64_t requests = carry_slot_ids.size(0);
  const ClearCarryParams params{data<int32_t>(carry_lens), data<const int32_t>(carry_slot_ids), requests, carry_lens.size(0)};
  launch(clear_carry_kernel, blocks_for(requests, 128), 128, carry_lens, params);
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("clear_carry", TORCH_BOX(&clear_carry)); }

}  // namespace carryover_kernels::cuda
