// qk_norm_rope on the CPU: checks and threads. The arithmetic is in qk_norm_rope_tile.h.
#include <tuple>

#include "../common/elem.h"
#include "carryover_kernels/ops.h"
#include "../common/arguments.h"
#include "workers.h"

namespace carryover_kernels {

std::tuple<Tensor, Tensor, Tensor> cpu::qk_norm_rope(
    Tensor qkv, Tensor positions, Tensor rope_table, std::optional<Tensor> q_norm_weight, std::optional<Tensor> k_norm_weight,
    int64_t num_q_heads, int64_t num_kv_heads, double eps, bool neox, bool share_kv, bool v_norm, bool rope_parity) {
  check_qk_norm_rope(
      qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads, eps, share_kv);

  const int64_t heads = num_q_heads + (share_kv ? 1 : 2) * num_kv_heads, width = qkv.size(1);
  const int64_t head_dim = width / heads, rotary_dim = rope_table.size(1), rows = qkv.size(0);
  Tensor q = torch::stable::new_empty(qkv, {rows, num_q_heads, head_dim});
  Tensor k = torch::stable::new_empty(qkv, {rows, num_kv_heads, head_dim});
  Tensor v = torch::stable::new_empty(qkv, {rows, num_kv_heads, head_dim});

  QkNormRopeArgs args = {};
  args.q = q.data_ptr(), args.k = k.data_ptr(), args.v = v.data_ptr(), args.qkv = qkv.data_ptr();
  args.type = elem_of(qkv);
  args.positions = data<const int64_t>(positions), args.rope_table = data<const float>(rope_table);
  args.q_norm_weight = data<const float>(q_norm_weight), args.k_norm_weight = data<const float>(k_norm_weight);
  args.rows = rows, args.qkv_row = qkv.stride(0), args.q_heads = num_q_heads, args.kv_heads = num_kv_heads, args.head_dim = head_dim;
  args.max_position = rope_table.size(0), args.rotary_dim = rotary_dim;
  args.eps = static_cast<float>(eps);
  args.neox = neox, args.share_kv = share_kv, args.v_norm = v_norm, args.rope_parity = rope_parity;

  // A row of a 4B drafter is 6144 elements, about 2 microseconds: four of them pay for waking a thread.
  const int64_t rows_a_unit = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width));
  const int64_t units = (rows + rows_a_unit - 1) / rows_a_unit;
  for_units(units, 0, units <= 2, [&](int64_t unit, void*) {
    kernels().qk_norm_rope(args, unit * rows_a_unit, std::min(rows, (unit + 1) * rows_a_unit));
  });
  return {q, k, v};
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("qk_norm_rope", TORCH_BOX(&cpu::qk_norm_rope)); }

}  // namespace carryover_kernels
