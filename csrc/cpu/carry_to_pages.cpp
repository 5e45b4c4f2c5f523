// carry_to_pages on the CPU: a request's free slots are its pages from token seq_lens on, up to the first page it does not have.
#include "carryover_kernels/ops.h"
#include "../common/arguments.h"

#include <algorithm>

namespace carryover_kernels {
namespace {

// Token indexes first..last-1 of one request whose pages are all there: the end of that run.
int64_t room_end(const int32_t* table, int64_t first, int64_t last, int64_t page_size) {
  for (int64_t index = first; index < last; index = (index / page_size + 1) * page_size)
    if (table[index / page_size] < 0) return index;
  return last;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cpu::carry_to_pages(
    Tensor row_cache_slot, Tensor row_carry_slot, Tensor query_start_loc, Tensor block_table, Tensor seq_lens, int64_t page_size,
    int64_t num_block_rows, std::optional<Tensor> slot_capacity) {
  check_carry_to_pages(
      row_cache_slot, row_carry_slot, query_start_loc, block_table, seq_lens, page_size, num_block_rows, slot_capacity);

  const int64_t rows = row_cache_slot.size(0), requests = seq_lens.size(0), columns = block_table.size(1);
  Tensor row_slot = torch::stable::new_empty(row_cache_slot, {rows});
  Tensor block_slot = torch::stable::new_empty(row_cache_slot, {requests, num_block_rows});
  Tensor lengths = torch::stable::new_empty(seq_lens, {requests});

  const auto* carry = data<const int64_t>(row_carry_slot);
  const auto* starts = data<const int32_t>(query_start_loc);
  const auto* tables = data<const int32_t>(block_table);
  const auto* committed_lens = data<const int32_t>(seq_lens);
  const auto* capacities = data<const int32_t>(slot_capacity);
  auto* row_out = data<int64_t>(row_slot);
  auto* block_out = data<int64_t>(block_slot);
  auto* length_out = data<int32_t>(lengths);

  std::copy_n(data<const int64_t>(row_cache_slot), rows, row_out);
  std::fill_n(block_out, requests * num_block_rows, int64_t{-1});
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t committed = committed_lens[r];
    length_out[r] = 0;
    if (committed < 0) continue;
    const int32_t* table = tables + r * block_table.stride(0);
    int64_t capacity = columns * page_size;
    if (capacities) capacity = std::min<int64_t>(capacity, capacities[r]);
    const int64_t room = std::max<int64_t>(0, room_end(table, committed, capacity, page_size) - committed);
    const int64_t block = std::min(num_block_rows, room);

    auto slot_of = [&](int64_t index) { return int64_t{table[index / page_size]} * page_size + index % page_size; };
    const int64_t first = std::clamp<int64_t>(starts[r], 0, rows), last = std::clamp<int64_t>(starts[r + 1], first, rows);
    int64_t carried = 0;
    for (int64_t row = first; row < last; ++row) {
      if (carry[row] < 0 || carried == room - block) continue;
      row_out[row] = slot_of(committed + carried++);
    }
    for (int64_t b = 0; b < block; ++b) block_out[r * num_block_rows + b] = slot_of(committed + carried + b);
    length_out[r] = static_cast<int32_t>(committed + carried + block);
  }
  return {row_slot, block_slot, lengths};
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("carry_to_pages", TORCH_BOX(&cpu::carry_to_pages)); }

}  // namespace carryover_kernels
