// One round of carryover drafting from a C++ engine: its own buffers in, drafter K/V and attention out. The same ops as
// examples/engine_round.py; numbers are filled by a formula, so that tests/test_cpp_example.py can compare the sums with Python's.
#include <carryover_kernels/ops.h>

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <stdexcept>

namespace ck = carryover_kernels::cpu;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
Tensor filled(std::vector<int64_t> shape, ScalarType type, const std::function<T(int64_t)>& value) {
  Tensor tensor = torch::stable::empty(shape, type);
  for (int64_t i = 0; i < tensor.numel(); ++i) static_cast<T*>(tensor.data_ptr())[i] = value(i);
  return tensor;
}

// Numbers in -0.5 .. 0.5 without a pattern that a shape could hide.
Tensor floats(std::vector<int64_t> shape, int64_t seed) {
  return filled<float>(
      std::move(shape), ScalarType::Float, [seed](int64_t i) { return ((i * 7919 + seed * 104729) % 1009) / 1009.0f - 0.5f; });
}

Tensor zeros(std::vector<int64_t> shape) {
  return filled<float>(std::move(shape), ScalarType::Float, [](int64_t) { return 0.0f; });
}

Tensor ints(std::initializer_list<int32_t> values) {
  return filled<int32_t>({static_cast<int64_t>(values.size())}, ScalarType::Int, [&](int64_t i) { return values.begin()[i]; });
}

Tensor longs(std::vector<int64_t> shape, std::initializer_list<int64_t> values) {
  return filled<int64_t>(std::move(shape), ScalarType::Long, [&](int64_t i) { return values.begin()[i]; });
}

double total(const Tensor& tensor) {
  double result = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) result += static_cast<const float*>(tensor.const_data_ptr())[i];
  return result;
}

int main() {
  // One request of 4 verify rows at positions 2..5 in pages of 4: the anchor's row and 3 drafts, of which the target keeps 1.
  const int64_t L = 1, H = 16, F = 24, HQ = 2, HKV = 1, D = 8, B = 4, C = 3;
  Tensor query_start_loc = ints({0, 4}), carry_lens = ints({0, 0}), carry_slot_ids = ints({1}), seq_lens = ints({4});
  auto [accepted, anchor, rejected] = ck::verify_draft(
      longs({1, 3}, {5, 6, 7}), query_start_loc, std::nullopt, /*target_argmax=*/longs({4}, {5, 9, 7, 1}));
  auto [cache_slot, carry_slot, position, block_start] = ck::plan_round(
      query_start_loc, rejected, longs({4}, {2, 3, 4, 5}), longs({4}, {10, 11, 4, 5}), carry_slot_ids, carry_lens, C);

  Tensor rope_table = filled<float>({64, D}, ScalarType::Float, [D](int64_t i) {
    const double angle = i / D * std::pow(1e4, -2.0 * (i % (D / 2)) / D);
    return static_cast<float>(i % D < D / 2 ? std::cos(angle) : std::sin(angle));
  });
  std::vector<Tensor> k_cache = {zeros({3, 4, HKV, D})}, v_cache = {zeros({3, 4, HKV, D})};
  Tensor carry_k = zeros({L, 2, C, HKV, D}), carry_v = zeros({L, 2, C, HKV, D});
  ck::project_states(
      floats({4, F}, 1), floats({H, F}, 2), floats({2 * L * HKV * D, H}, 3), std::nullopt, std::nullopt, /*mark=*/floats({H}, 4),
      std::nullopt, rope_table, cache_slot, carry_slot, position, k_cache, v_cache, carry_k, carry_v);

  auto [q, k, v] = ck::qk_norm_rope(
      floats({B, (HQ + 2 * HKV) * D}, 5), longs({4}, {4, 5, 6, 7}), rope_table, std::nullopt, std::nullopt, HQ, HKV);
  auto block = [&](const Tensor& rows, int64_t heads) { return torch::stable::view(rows, {1, B, heads, D}); };
  Tensor block_table = filled<int32_t>({1, 2}, ScalarType::Int, [](int64_t i) { return i == 0 ? 2 : 1; });
  auto [out, lse] = ck::block_attention(
      block(q, HQ), block(k, HKV), block(v, HKV), k_cache[0], v_cache[0], block_table, seq_lens,
      torch::stable::select(carry_k, 0, 0), torch::stable::select(carry_v, 0, 0), carry_lens, carry_slot_ids);

  std::printf(
      "accepted %d next %lld carried %d block_start %lld k %.6f carry_k %.6f out %.6f\n", static_cast<int32_t*>(accepted.data_ptr())[0],
      static_cast<long long>(static_cast<int64_t*>(anchor.data_ptr())[0]), static_cast<int32_t*>(carry_lens.data_ptr())[1],
      static_cast<long long>(static_cast<int64_t*>(block_start.data_ptr())[0]), total(k_cache[0]), total(carry_k), total(out));
  try {
    ck::clear_carry(longs({1}, {1}), carry_lens);
  } catch (const std::runtime_error& error) {
    std::printf("refused: %s\n", error.what());
  }
  ck::clear_carry(carry_slot_ids, carry_lens);
  std::printf("carried after clear_carry: %d\n", static_cast<int32_t*>(carry_lens.data_ptr())[1]);
}
