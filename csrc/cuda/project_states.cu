// project_states' door on CUDA.
#include "project_states.cuh"

#include "../common/elem.h"
#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

template <class T, int kRows>
void start(ProjectStatesParams& p, const std::vector<CacheOfLayer>& caches, const Tensor& on) {
  const int64_t row_tiles = blocks_for(p.rows, kRows);
  if (p.fc_weight)
    launch(project_fc_kernel<T, kRows>, row_tiles * blocks_for(p.hidden, kColumnsAChunk), kProductThreads, on, p,
           kProductBytes<kRows> + kRows * kColumnsAChunk * 4);
  launch(project_norm_kernel<T>, p.rows, kProductThreads, on, p, 16);
  const int64_t layers = static_cast<int64_t>(caches.size()), pitch = blocks_for(p.head_dim, kColumnsAChunk) * kColumnsAChunk;
  for (p.first_layer = 0; p.first_layer < layers; p.first_layer += kLayersALaunch) {
    p.layers = layers - p.first_layer < kLayersALaunch ? layers - p.first_layer : kLayersALaunch;
    for (int64_t i = 0; i < p.layers; ++i) p.cache[i] = caches[p.first_layer + i];
    launch(project_kv_kernel<T, kRows>, row_tiles * p.layers * (p.share_kv ? 1 : 2) * p.kv_heads, kProductThreads, on, p,
           kProductBytes<kRows> + static_cast<int>(kRows * pitch * 4));
  }
}

void project_states(
    Tensor states, MaybeTensor fc_weight, Tensor kv_weight, MaybeTensor kv_bias, MaybeTensor k_norm_weight, MaybeTensor mark,
    MaybeTensor mark_kv, Tensor rope_table, Tensor row_cache_slot, Tensor row_carry_slot, Tensor row_position, std::vector<Tensor> k_cache,
    std::vector<Tensor> v_cache, MaybeTensor carry_k, MaybeTensor carry_v, double norm_eps, double k_norm_eps, bool neox, bool share_kv,
    bool v_norm, bool rope_parity, MaybeTensor k_scale, MaybeTensor v_scale) {
  check_project_states(
      states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
      k_cache, v_cache, carry_k, carry_v, norm_eps, k_norm_eps, share_kv, k_scale, v_scale);
  ProjectStatesParams p{};
  p.rows = states.size(0), p.features = states.size(1), p.hidden = kv_weight.size(1), p.stride_states = states.stride(0);
  p.kv_heads = k_cache[0].size(2), p.head_dim = k_cache[0].size(3), p.rotary_dim = rope_table.size(1), p.max_position = rope_table.size(0);
  if (p.rows == 0) return;
  p.states = states.data_ptr(), p.fc_weight = fc_weight ? fc_weight->data_ptr() : nullptr, p.kv_weight = kv_weight.data_ptr();
  p.kv_bias = data<const float>(kv_bias), p.k_norm_weight = data<const float>(k_norm_weight), p.mark = data<const float>(mark);
  p.mark_kv = data<const float>(mark_kv), p.rope_table = data<const float>(rope_table);
  p.k_scale = data<const float>(k_scale), p.v_scale = data<const float>(v_scale);
  p.row_cache_slot = data<const int64_t>(row_cache_slot), p.row_carry_slot = data<const int64_t>(row_carry_slot);
  p.row_position = data<const int64_t>(row_position);
  p.cache_type = elem_of(k_cache[0]), p.page_size = k_cache[0].size(1), p.cache_slots = k_cache[0].size(0) * p.page_size;
  std::vector<CacheOfLayer> caches;
  for (size_t i = 0; i < k_cache.size(); ++i) {
    const Tensor &k = k_cache[i], &v = v_cache[i];
    caches.push_back({k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2)});
  }
  if (carry_k) {
    p.carry_k = carry_k->data_ptr(), p.carry_v = carry_v->data_ptr(), p.carry_type = elem_of(*carry_k);
    p.ck_layer = carry_k->stride(0), p.ck_slot = carry_k->stride(1), p.ck_row = carry_k->stride(2), p.ck_head = carry_k->stride(3);
    p.cv_layer = carry_v->stride(0), p.cv_slot = carry_v->stride(1), p.cv_row = carry_v->stride(2), p.cv_head = carry_v->stride(3);
    p.carry_capacity = carry_k->size(2), p.carry_slots = carry_k->size(1) * p.carry_capacity;
  }
  p.norm_eps = static_cast<float>(norm_eps), p.k_norm_eps = static_cast<float>(k_norm_eps);
  p.neox = neox, p.share_kv = share_kv, p.v_norm = v_norm, p.parity = rope_parity;

  Tensor normed = torch::stable::new_empty(states, {p.rows, p.hidden});
  Tensor fused = torch::stable::new_empty(states, {fc_weight ? p.rows * p.hidden : 0}, ScalarType::Float);
  p.normed = normed.data_ptr(), p.fused = fc_weight ? data<float>(fused) : nullptr;

  // The tall tile reads the weights a quarter as often; with wide heads its result would not fit into shared memory.
  const auto by_rows = [&](auto element) {
    using T = decltype(element);
    if (p.rows > 16 && p.head_dim <= 256) start<T, 64>(p, caches, states);
    else start<T, 16>(p, caches, states);
  };
  if (states.scalar_type() == ScalarType::Float) by_rows(float{});
  else if (states.scalar_type() == ScalarType::BFloat16) by_rows(BFloat16{});
  else by_rows(Float16{});
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("project_states", TORCH_BOX(&project_states)); }

}  // namespace carryover_kernels::cuda
