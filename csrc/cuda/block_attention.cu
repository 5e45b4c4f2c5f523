// block_attention's door on CUDA.
#include "block_attention.cuh"

#include "../common/elem.h"
#include "../common/split_planner.h"
#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

Segment segment(const Tensor& k, const Tensor& v) {
  return {k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2), elem_of(k)};
}

// The products run in q's type where it holds the keys exactly (fp8 too), else in float32.
bool in_float(const BlockAttentionParams& p) {
  const bool fp8 = p.cache.type == Elem::e4m3 || p.cache.type == Elem::e5m2;
  return p.type == Elem::f32 || !(fp8 || p.cache.type == p.type) || (p.carry.k && p.carry.type != p.type);
}

template <class T, int kColumns>
void start(BlockAttentionParams& p, int64_t num_splits, const Tensor& on) {
  p.parts = blocks_for(p.head_dim, kColumns);
  const int64_t tasks = p.requests * p.kv_heads * p.row_tiles * p.parts, keys = p.table_width * p.page_size;
  // From shapes alone: a captured graph keeps its count when lengths change.
  p.splits = num_splits ? num_splits : plan_splits(tasks, keys, workers(on), kTileKeys<T>);
  const int64_t most = keys > kTileKeys<T> ? blocks_for(keys, kTileKeys<T>) : 1;
  if (p.splits > most) p.splits = most;
  const int64_t query_rows = p.requests * p.rows * p.q_heads, in_parts = p.splits > 1 ? query_rows * p.splits : 0;
  Workspace space(on, in_parts * (p.head_dim + 2));
  p.partial = space.take<float>(in_parts * p.head_dim), p.state = space.take<float>(in_parts * 2);
  launch(block_attention_kernel<T, kColumns>, tasks * p.splits, kAttentionThreads, on, p, static_cast<int>(AttentionLayout<T, kColumns>(p.head_dim).bytes));
  if (p.splits > 1) launch(merge_splits_kernel, blocks_for(query_rows, kAttentionThreads / 32), kAttentionThreads, on, p);
}

template <class T>
void by_columns(BlockAttentionParams& p, int64_t num_splits, const Tensor& on) {
  if (p.head_dim <= 64) start<T, 64>(p, num_splits, on);
  else start<T, 128>(p, num_splits, on);
}

std::tuple<Tensor, Tensor> block_attention(
    Tensor q, Tensor k_block, Tensor v_block, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, MaybeTensor carry_k,
    MaybeTensor carry_v, MaybeTensor carry_lens, MaybeTensor carry_slot_ids, MaybeTensor block_start, MaybeTensor carry_positions,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right, MaybeTensor sinks, double softcap,
    MaybeTensor k_scale, MaybeTensor v_scale, int64_t num_splits, bool return_lse) {
  check_block_attention(
      q, k_block, v_block, k_cache, v_cache, block_table, seq_lens, carry_k, carry_v, carry_lens, carry_slot_ids, block_start,
      carry_positions, scale, window_left, window_right, sinks, softcap, k_scale, v_scale, num_splits);
  BlockAttentionParams p{};
  p.requests = q.size(0), p.rows = q.size(1), p.q_heads = q.size(2), p.head_dim = q.size(3);
  p.key_rows = k_block.size(1), p.kv_heads = k_block.size(2);
  Tensor out = torch::stable::new_empty(q, {p.requests, p.rows, p.q_heads, p.head_dim});
  Tensor lse = return_lse ? torch::stable::new_empty(q, {p.requests, p.rows, p.q_heads}, ScalarType::Float)
                          : torch::stable::new_empty(q, {0}, ScalarType::Float);
  const int64_t query_rows = p.rows * (p.q_heads / p.kv_heads);
  if (p.requests == 0 || query_rows == 0 || p.head_dim == 0) return {out, lse};
  p.out = out.data_ptr(), p.lse = return_lse ? data<float>(lse) : nullptr, p.q = q.data_ptr(), p.type = elem_of(q);
  p.q_request = q.stride(0), p.q_row = q.stride(1), p.q_head = q.stride(2);
  p.cache = segment(k_cache, v_cache), p.block = segment(k_block, v_block);
  p.pages = k_cache.size(0), p.page_size = k_cache.size(1);
  p.block_table = data<const int32_t>(block_table), p.stride_table = block_table.stride(0), p.table_width = block_table.size(1);
  p.seq_lens = data<const int32_t>(seq_lens);
  if (carry_k) {
    p.carry = segment(*carry_k, *carry_v), p.carry_slots = carry_k->size(0), p.carry_capacity = carry_k->size(1);
    p.carry_lens = data<const int32_t>(carry_lens), p.carry_slot_ids = data<const int32_t>(carry_slot_ids);
  }
  p.block_start = data<const int64_t>(block_start), p.carry_positions = data<const int64_t>(carry_positions);
  p.sinks = data<const float>(sinks), p.k_scale = data<const float>(k_scale), p.v_scale = data<const float>(v_scale);
  p.scale_log2 = static_cast<float>((scale ? *scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim))) * kLog2e);
  p.softcap_log2 = static_cast<float>(softcap * kLog2e);
  p.causal = causal, p.window_left = window_left, p.window_right = window_right;
  p.row_tiles = blocks_for(query_rows, kQueryRows);
  if (in_float(p)) by_columns<float>(p, num_splits, q);
  else if (p.type == Elem::bf16) by_columns<BFloat16>(p, num_splits, q);
  else by_columns<Float16>(p, num_splits, q);
  return {out, lse};
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("block_attention", TORCH_BOX(&block_attention)); }

}  // namespace carryover_kernels::cuda
