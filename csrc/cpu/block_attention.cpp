// block_attention on the CPU: checks, the plan of parts, their merge. The arithmetic is in block_attention_tile.h.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "../common/split_planner.h"
#include "../common/arguments.h"
#include "../common/elem.h"
#include "carryover_kernels/ops.h"
#include "key_list.h"
#include "workers.h"

namespace carryover_kernels {
std::tuple<Tensor, Tensor> cpu::block_attention(
    Tensor q, Tensor k_block, Tensor v_block, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
    std::optional<Tensor> carry_k, std::optional<Tensor> carry_v, std::optional<Tensor> carry_lens, std::optional<Tensor> carry_slot_ids,
    std::optional<Tensor> block_start, std::optional<Tensor> carry_positions, std::optional<double> scale, bool causal, int64_t window_left,
    int64_t window_right, std::optional<Tensor> sinks, double softcap, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
    int64_t num_splits, bool return_lse) {
  check_block_attention(
      q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k, carry_v, carry_lens, carry_slot_ids, block_start,
      carry_positions, scale, window_left, window_right, sinks, softcap, k_scale, v_scale, num_splits);

  AttentionArgs args = {};
  args.requests = q.size(0), args.rows = q.size(1), args.q_heads = q.size(2), args.head_dim = q.size(3);
  args.key_rows = k_block.size(1), args.kv_heads = k_block.size(2);
  Tensor out = torch::stable::new_empty(q, {args.requests, args.rows, args.q_heads, args.head_dim});
  Tensor lse = return_lse ? torch::stable::new_empty(q, {args.requests, args.rows, args.q_heads}, ScalarType::Float)
                          : torch::stable::new_empty(q, {0}, ScalarType::Float);
  args.out = out.data_ptr();
  args.lse = return_lse ? data<float>(lse) : nullptr;

  args.q = q.data_ptr(), args.k_block = k_block.data_ptr(), args.v_block = v_block.data_ptr();
  args.k_cache = k_cache.data_ptr(), args.v_cache = v_cache.data_ptr();
  args.type = elem_of(q), args.cache_type = elem_of(k_cache);
  args.block_table = data<const int32_t>(block_table), args.seq_lens = data<const int32_t>(seq_lens);
  args.block_start = data<const int64_t>(block_start), args.carry_positions = data<const int64_t>(carry_positions);
  args.sinks = data<const float>(sinks), args.k_scale = data<const float>(k_scale), args.v_scale = data<const float>(v_scale);
  args.q_request = q.stride(0), args.q_row = q.stride(1), args.q_head = q.stride(2);
  args.kb_request = k_block.stride(0), args.kb_row = k_block.stride(1), args.kb_head = k_block.stride(2);
  args.vb_request = v_block.stride(0), args.vb_row = v_block.stride(1), args.vb_head = v_block.stride(2);
  args.kc_page = k_cache.stride(0), args.kc_slot = k_cache.stride(1), args.kc_head = k_cache.stride(2);
  args.vc_page = v_cache.stride(0), args.vc_slot = v_cache.stride(1), args.vc_head = v_cache.stride(2);
  args.table_request = block_table.stride(0);
  args.pages = k_cache.size(0), args.page_size = k_cache.size(1), args.table_width = block_table.size(1);
  if (carry_k) {
    args.carry_k = carry_k->data_ptr(), args.carry_v = carry_v->data_ptr(), args.carry_type = elem_of(*carry_k);
    args.carry_lens = data<const int32_t>(carry_lens), args.carry_slot_ids = data<const int32_t>(carry_slot_ids);
    args.ck_slot = carry_k->stride(0), args.ck_row = carry_k->stride(1), args.ck_head = carry_k->stride(2);
    args.cv_slot = carry_v->stride(0), args.cv_row = carry_v->stride(1), args.cv_head = carry_v->stride(2);
    args.carry_slots = carry_k->size(0), args.carry_capacity = carry_k->size(1);
  }
  args.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(args.head_dim)));
  args.softcap = static_cast<float>(softcap);
  args.causal = causal, args.window_left = window_left, args.window_right = window_right;

  const int64_t query_rows = args.rows * (args.q_heads / args.kv_heads);
  if (args.requests == 0 || query_rows == 0 || args.head_dim == 0) return {out, lse};

  // Row tiles of one (request, KV head) read the same keys; they are neighbours, so that a core finds them in its cache.
  const KernelTable& table = kernels();
  const int64_t row_tiles = (query_rows + kRowTile - 1) / kRowTile;
  std::vector<int64_t> totals(args.requests);
  int64_t longest = 0, all_keys = 0;
  for (int64_t r = 0; r < args.requests; ++r) {
    totals[r] = key_list(args, r).total;
    longest = std::max(longest, totals[r]), all_keys += totals[r];
  }
  // A part takes as many heads as leave every thread busy, and whose outputs stay in half of L2.
  const int64_t threads = torch::stable::get_num_threads();
  // Requests counted by the longest's length: a short one does not keep a thread busy for as long.
  const int64_t full_tasks = std::max<int64_t>(1, longest ? all_keys * row_tiles / longest : 1);
  const int64_t head_groups = std::min(args.kv_heads, std::max<int64_t>(1, (threads + full_tasks - 1) / full_tasks));
  const int64_t in_cache = std::max<int64_t>(1, 512 * 1024 / (kRowTile * args.head_dim * 4));
  const int64_t part_heads = std::min(in_cache, (args.kv_heads + head_groups - 1) / head_groups);
  const int64_t groups = (args.kv_heads + part_heads - 1) / part_heads;
  int64_t splits = num_splits;
  if (splits == 0) splits = plan_splits(full_tasks * groups, longest, threads, kKeyTile);
  splits = std::clamp<int64_t>(splits, 1, std::max<int64_t>(1, (longest + kKeyTile - 1) / kKeyTile));

  std::vector<AttentionPart> parts;
  parts.reserve(args.requests * groups * row_tiles * splits);
  std::vector<std::pair<int64_t, int64_t>> merges;  // first part and count, where a task has several
  for (int64_t r = 0; r < args.requests; ++r) {
    const int64_t own_splits = std::clamp<int64_t>(std::min(splits, (totals[r] + kKeyTile - 1) / kKeyTile), 1, splits);
    for (int64_t head = 0; head < args.kv_heads; head += part_heads) {
      const int64_t heads = std::min(part_heads, args.kv_heads - head);
      for (int64_t tile = 0; tile < row_tiles; ++tile) {
        if (own_splits > 1) merges.emplace_back(static_cast<int64_t>(parts.size()), own_splits);
        for (int64_t split = 0; split < own_splits; ++split) {
          const KeyRange keys = split_keys(totals[r], kKeyTile, own_splits, split);
          const int64_t first_row = tile * kRowTile;
          const int64_t num_rows = std::min(kRowTile, query_rows - first_row);
          parts.push_back({r, head, heads, first_row, num_rows, keys.first, keys.last, nullptr, nullptr});
        }
      }
    }
  }

  int64_t partial_parts = 0;
  for (const auto& merge : merges) partial_parts += merge.second;
  const int64_t out_floats = part_heads * kRowTile * args.head_dim, state_floats = part_heads * kRowTile * 2;
  const Scratch partial_out(partial_parts * out_floats * 4), partial_state(partial_parts * state_floats * 4);
  int64_t used = 0;
  for (const auto& merge : merges) {
    // Parts of one merge lie one behind another; the last group may have fewer heads than the space it gets.
    const int64_t heads = parts[merge.first].num_heads;
    for (int64_t i = 0; i < merge.second; ++i) {
      parts[merge.first + i].partial_out = partial_out.as<float>() + used * out_floats + i * heads * kRowTile * args.head_dim;
      parts[merge.first + i].partial_state = partial_state.as<float>() + used * state_floats + i * heads * kRowTile * 2;
    }
    used += merge.second;
  }

  // Waking the other threads costs a few microseconds: not for less work than that.
  const bool alone = all_keys * query_rows * args.kv_heads * args.head_dim < 400000;
  const int64_t workspace = table.attention_workspace(args, part_heads);
  for_units(static_cast<int64_t>(parts.size()), workspace, alone, [&](int64_t unit, void* at) {
    table.attention_part(args, parts[unit], at);
  });
  for_units(static_cast<int64_t>(merges.size()), 0, alone || merges.size() < 4, [&](int64_t unit, void*) {
    table.attention_merge(args, parts[merges[unit].first], merges[unit].second);
  });
  return {out, lse};
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("block_attention", TORCH_BOX(&cpu::block_attention)); }

}  // namespace carryover_kernels
