// clear_carry on the CPU.
#include "carryover_kernels/ops.h"
#include "../common/arguments.h"

namespace carryover_kernels {

void cpu::clear_carry(Tensor carry_slot_ids, Tensor carry_lens) {
  check_clear_carry(carry_slot_ids, carry_lens);

  const auto* slot = data<const int32_t>(carry_slot_ids);
  auto* lens = data<int32_t>(carry_lens);
  for (int64_t r = 0; r < carry_slot_ids.size(0); ++r) {
    if (slot[r] >= 0 && slot[r] < carry_lens.size(0)) lens[slot[r]] = 0;
  }
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("clear_carry", TORCH_BOX(&cpu::clear_carry)); }

}  // namespace carryover_kernels
