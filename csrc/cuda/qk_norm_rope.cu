// qk_norm_rope's door on CUDA.
#include "qk_norm_rope.cuh"

#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> qk_norm_rope(
    Tensor qkv, Tensor positions, Tensor rope_table, MaybeTensor q_norm_weight, MaybeTensor k_norm_weight, int64_t num_q_heads,
    int64_t num_kv_heads, double eps, bool neox, bool share_kv, bool v_norm, bool rope_parity) {
  check_qk_norm_rope(qkv, positions, rope_table, q_norm_weight, k_norm_weight, num_q_heads, num_kv_heads, eps, share_kv);
  const int64_t rows = qkv.size(0), head_dim = qkv.size(1) / (num_q_heads + (share_kv ? 1 : 2) * num_kv_heads);
  Tensor q = torch::stable::new_empty(qkv, {rows, num_q_heads, head_dim});
  Tensor k = torch::stable::new_empty(qkv, {rows, num_kv_heads, head_dim});
  Tensor v = torch::stable::new_empty(qkv, {rows, num_kv_heads, head_dim});
  const QkNormRopeParams params{
      q.data_ptr(), k.data_ptr(), v.data_ptr(), qkv.data_ptr(), data<const float>(rope_table), data<const float>(q_norm_weight),
      data<const float>(k_norm_weight), data<const int64_t>(positions), qkv.stride(0), rows, rope_table.size(0),
      static_cast<int>(num_q_heads), static_cast<int>(num_kv_heads), static_cast<int>(head_dim), static_cast<int>(rope_table.size(1)),
      static_cast<float>(eps), neox, share_kv, v_norm, rope_parity};
  const auto kernel = qkv.scalar_type() == ScalarType::Float      ? qk_norm_rope_kernel<float>
                      : qkv.scalar_type() == ScalarType::BFloat16 ? qk_norm_rope_kernel<BFloat16>
                                                                  : qk_norm_rope_kernel<Float16>;
  launch(kernel, blocks_for(rows * (num_q_heads + 2 * num_kv_heads), kHeadsABlock), 32 * kHeadsABlock, qkv, params);
  return {q, k, v};
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope)); }

}  // namespace carryover_kernels::cuda
