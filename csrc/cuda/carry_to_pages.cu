// carry_to_pages' door on CUDA.
#include "carry_to_pages.cuh"

#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> carry_to_pages(
    Tensor row_cache_slot, Tensor row_carry_slot, Tensor query_start_loc, Tensor block_table, Tensor seq_lens, int64_t page_size,
    int64_t num_block_rows, MaybeTensor slot_capacity) {
  check_carry_to_pages(row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity);
  const int64_t rows = row_cache_slot.size(0), requests = seq_lens.size(0);
  Tensor row_slot = torch::stable::new_empty(row_cache_slot, {rows});
  Tensor block_slot = torch::stable::new_empty(row_cache_slot, {requests, num_block_rows});
  Tensor lengths = torch::stable::new_empty(seq_lens, {requests});
  const CarryToPagesParams params{
      data<int64_t>(row_slot), data<int64_t>(block_slot), data<int32_t>(lengths), data<const int64_t>(row_cache_slot),
      data<const int64_t>(row_carry_slot), data<const int32_t>(query_start_loc), data<const int32_t>(block_table),
      data<const int32_t>(seq_lens), data<const int32_t>(slot_capacity), block_table.stride(0), rows, requests, block_table.size(1),
      page_size, num_block_rows};
  launch(carry_to_pages_kernel, blocks_for(rows + requests * (num_block_rows + 1), 128), 128, row_cache_slot, params);
  return {row_slot, block_slot, lengths};
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("carry_to_pages", TORCH_BOX(&carry_to_pages)); }

}  // namespace carryover_kernels::cuda
