// project_states on the CPU: checks, which rows are stored, and three sweeps of units. The arithmetic is in project_states_tile.h.
#include <algorithm>
#include <vector>

#include "../common/arguments.h"
#include "../common/elem.h"
#include "carryover_kernels/ops.h"
#include "workers.h"

namespace carryover_kernels {
namespace {

// Rows a pass of the weights serves: their packed states stay in the last cache level, and longer prompts take more passes.
constexpr int64_t kRowsAPass = 256;

}  // namespace

void cpu::project_states(
    Tensor states, std::optional<Tensor> fc_weight, Tensor kv_weight, std::optional<Tensor> kv_bias, std::optional<Tensor> k_norm_weight,
    std::optional<Tensor> mark, std::optional<Tensor> mark_kv, Tensor rope_table, Tensor row_cache_slot, Tensor row_carry_slot,
    Tensor row_position, std::vector<Tensor> k_cache, std::vector<Tensor> v_cache, std::optional<Tensor> carry_k,
    std::optional<Tensor> carry_v, double norm_eps, double k_norm_eps, bool neox, bool share_kv, bool v_norm, bool rope_parity,
    std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  check_project_states(
      states, fc_weight, kv_weight, kv_bias, k_norm_weight, mark, mark_kv, rope_table, row_cache_slot, row_carry_slot, row_position,
      k_cache, v_cache, carry_k, carry_v, norm_eps, k_norm_eps, share_kv, k_scale, v_scale);

  ProjectArgs args = {};
  args.states = states.data_ptr(), args.kv_weight = kv_weight.data_ptr(), args.type = elem_of(states);
  args.fc_weight = fc_weight ? fc_weight->data_ptr() : nullptr;
  args.kv_bias = data<const float>(kv_bias), args.k_norm_weight = data<const float>(k_norm_weight);
  args.mark = data<const float>(mark), args.mark_kv = data<const float>(mark_kv), args.rope_table = data<const float>(rope_table);
  args.row_cache_slot = data<const int64_t>(row_cache_slot), args.row_carry_slot = data<const int64_t>(row_carry_slot);
  args.row_position = data<const int64_t>(row_position);

  args.layers = static_cast<int64_t>(k_cache.size());
  std::vector<void*> k_at, v_at;
  std::vector<int64_t> strides;
  for (int64_t layer = 0; layer < args.layers; ++layer) {
    k_at.push_back(k_cache[layer].data_ptr());
    v_at.push_back(v_cache[layer].data_ptr());
    for (int64_t i = 0; i < 3; ++i) strides.push_back(k_cache[layer].stride(i));
    for (int64_t i = 0; i < 3; ++i) strides.push_back(v_cache[layer].stride(i));
  }
  args.k_cache = k_at.data(), args.v_cache = v_at.data(), args.cache_strides = strides.data(), args.cache_type = elem_of(k_cache[0]);
  int64_t carry_rows = 0;
  if (carry_k) {
    args.carry_k = carry_k->data_ptr(), args.carry_v = carry_v->data_ptr(), args.carry_type = elem_of(*carry_k);
    args.ck_layer = carry_k->stride(0), args.ck_slot = carry_k->stride(1);
    args.ck_row = carry_k->stride(2), args.ck_head = carry_k->stride(3);
    args.cv_layer = carry_v->stride(0), args.cv_slot = carry_v->stride(1);
    args.cv_row = carry_v->stride(2), args.cv_head = carry_v->stride(3);
    args.carry_capacity = carry_k->size(2);
    carry_rows = carry_k->size(1) * carry_k->size(2);
  }
  args.k_scale = data<const float>(k_scale), args.v_scale = data<const float>(v_scale);

  args.rows = states.size(0), args.states_row = states.stride(0), args.features = states.size(1), args.hidden = kv_weight.size(1);
  args.kv_heads = k_cache[0].size(2), args.head_dim = k_cache[0].size(3), args.rotary_dim = rope_table.size(1);
  args.page_size = k_cache[0].size(1);
  args.norm_eps = static_cast<float>(norm_eps), args.k_norm_eps = static_cast<float>(k_norm_eps);
  args.neox = neox, args.share_kv = share_kv, args.v_norm = v_norm, args.rope_parity = rope_parity;

  const int64_t cache_rows = k_cache[0].size(0) * args.page_size, max_position = rope_table.size(0);
  std::vector<int64_t> active;
  std::vector<uint8_t> in_pages, in_carry;
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t slot = args.row_cache_slot[row], carry_slot = args.row_carry_slot[row], position = args.row_position[row];
    const bool pages = slot >= 0 && slot < cache_rows, carry = carry_slot >= 0 && carry_slot < carry_rows;
    if (!(pages || carry) || position < 0 || position >= max_position) continue;
    active.push_back(row), in_pages.push_back(pages), in_carry.push_back(carry);
  }

  const KernelTable& table = kernels();
  const int64_t all = static_cast<int64_t>(active.size());
  for (int64_t first = 0; first < all; first += kRowsAPass) {
    args.num_active = std::min(kRowsAPass, all - first);
    args.active = active.data() + first, args.in_pages = in_pages.data() + first, args.in_carry = in_carry.data() + first;
    const ProjectSizes sizes = table.project_sizes(args);
    const int64_t workspace = table.project_workspace(args), lanes = sizes.lanes;
    const Scratch packed_states(sizes.packed_states), packed_hidden(sizes.packed_hidden);
    const Scratch floats(lanes * (std::max<int64_t>(sizes.fc_units, 1) + 1 + args.rotary_dim) * 4);
    args.packed_states = packed_states.get(), args.packed_hidden = packed_hidden.get();
    args.inverse_rms = floats.as<float>(), args.rotation = args.inverse_rms + lanes;
    args.partial_squares = args.rotation + lanes * args.rotary_dim;

    // Multiplications a sweep; below about 20 microseconds of them one thread is quicker than waking another.
    const bool fc_alone = lanes * args.features * args.hidden < 2000000, kv_alone = lanes * kv_weight.size(0) * args.hidden < 2000000;
    const bool pack_alone = lanes * args.features < 100000;
    for_units(sizes.pack_units, workspace, pack_alone, [&](int64_t unit, void* at) { table.project_pack(args, unit, at); });
    for_units(sizes.fc_units, workspace, fc_alone, [&](int64_t unit, void* at) { table.project_fc(args, unit, at); });
    table.project_norms(args);
    for_units(sizes.kv_units, workspace, kv_alone, [&](int64_t unit, void* at) { table.project_kv(args, unit, at); });
  }
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("project_states", TORCH_BOX(&cpu::project_states)); }

}  // namespace carryover_kernels
