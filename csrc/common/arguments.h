// The argument checks of each op, shared by its doors on the CPU and on CUDA.
#pragma once

#include "check.h"

namespace carryover_kernels {

using MaybeTensor = std::optional<Tensor>;

inline void check_plan_round(
    const Tensor& query_start_loc, const Tensor& num_rejected, const Tensor& positions, const Tensor& slot_mapping,
    const Tensor& carry_slot_ids, const Tensor& carry_lens, int64_t carry_capacity, const MaybeTensor& carry_positions) {
  Checker check("plan_round");
  check.tensor("query_start_loc", query_start_loc, "R+1", kInt32, Layout::contiguous);
  check.require(query_start_loc.size(0) >= 1, "query_start_loc has 0 entries, must have R+1, at least 1");
  check.bind("R", query_start_loc.size(0) - 1);
  check.tensor("num_rejected", num_rejected, "R", kInt32, Layout::contiguous);
  check.tensor("positions", positions, "T", kInt64, Layout::contiguous);
  check.tensor("slot_mapping", slot_mapping, "T", kInt64, Layout::contiguous);
  check.tensor("carry_slot_ids", carry_slot_ids, "R", kInt32, Layout::contiguous);
  check.tensor("carry_lens", carry_lens, "slots", kInt32, Layout::contiguous);
  check.at_least("carry_capacity", carry_capacity, 0);
  check.bind("C", carry_capacity);
  check.tensor("carry_positions", carry_positions, "slots C", kInt64, Layout::contiguous);
}

inline void check_clear_carry(const Tensor& carry_slot_ids, const Tensor& carry_lens) {
  Checker check("clear_carry");
  check.tensor("carry_slot_ids", carry_slot_ids, "R", kInt32, Layout::contiguous);
  check.tensor("carry_lens", carry_lens, "slots", kInt32, Layout::contiguous);
}

inline void check_carry_to_pages(
    const Tensor& row_cache_slot, const Tensor& row_carry_slot, const Tensor& query_start_loc, const Tensor& block_table,
    const Tensor& seq_lens, int64_t page_size, int64_t num_block_rows, const MaybeTensor& slot_capacity) {
  Checker check("carry_to_pages");
  check.tensor("row_cache_slot", row_cache_slot, "T", kInt64, Layout::contiguous);
  check.tensor("row_carry_slot", row_carry_slot, "T", kInt64, Layout::contiguous);
  check.tensor("query_start_loc", query_start_loc, "R+1", kInt32, Layout::contiguous);
  check.require(query_start_loc.size(0) >= 1, "query_start_loc has 0 entries, must have R+1, at least 1");
  check.bind("R", query_start_loc.size(0) - 1);
  check.tensor("block_table", block_table, "R P", kInt32, Layout::last_contiguous);
  check.tensor("seq_lens", seq_lens, "R", kInt32, Layout::contiguous);
  check.at_least("page_size", page_size, 1);
  check.at_least("num_block_rows", num_block_rows, 0);
  check.tensor("slot_capacity", slot_capacity, "R", kInt32, Layout::contiguous);
}

inline void check_qk_norm_rope(
    const Tensor& qkv, const Tensor& positions, const Tensor& rope_table, const MaybeTensor& q_norm_weight, const MaybeTensor& k_norm_weight,
    int64_t num_q_heads, int64_t num_kv_heads, double eps, bool share_kv) {
  Checker check("qk_norm_rope");
  check.tensor("qkv", qkv, "M width", kActivations, Layout::last_contiguous);
  check.tensor("positions", positions, "M", kInt64, Layout::contiguous);
  check.tensor("rope_table", rope_table, "max_position rotary_dim", kFloat32, Layout::contiguous);
  check.at_least("num_q_heads", num_q_heads, 1);
  check.at_least("num_kv_heads", num_kv_heads, 1);
  const int64_t heads = num_q_heads + (share_kv ? 1 : 2) * num_kv_heads, width = qkv.size(1);
  check.require(width % heads == 0 && width > 0, [&] {
    return "qkv has " + std::to_string(width) + " columns, must be a positive multiple of its " + std::to_string(heads) + " heads";
  });
  const int64_t head_dim = width / heads, rotary_dim = rope_table.size(1);
  check.require(rotary_dim % 2 == 0 && rotary_dim > 0 && rotary_dim <= head_dim, [&] {
    return "rope_table has " + std::to_string(rotary_dim) + " columns, must be even and at most the head dim " + std::to_string(head_dim);
  });
  check.bind("D", head_dim);
  check.tensor("q_norm_weight", q_norm_weight, "D", kFloat32, Layout::contiguous);
  check.tensor("k_norm_weight", k_norm_weight, "D", kFloat32, Layout::contiguous);
  check.finite_and_not_negative("eps", eps);
}

inline void check_verify_draft(
    const Tensor& draft_tokens, const Tensor& query_start_loc, const MaybeTensor& target_logits, const MaybeTensor& target_argmax,
    const MaybeTensor& draft_probs, const MaybeTensor& seeds, const MaybeTensor& offsets, const std::string& method) {
  Checker check("verify_draft");
  check.tensor("draft_tokens", draft_tokens, "R N", kInt64, Layout::contiguous);
  check.bind("R+1", draft_tokens.size(0) + 1);
  check.tensor("query_start_loc", query_start_loc, "R+1", kInt32, Layout::contiguous);
  check.one_of("method", method, {"greedy", "rejection", "block"});
  if (method == "greedy") {
    check.require(
        target_logits.has_value() != target_argmax.has_value(),
        std::string("target_argmax is ") + (target_argmax ? "given" : "None") +
            ", must be given with method 'greedy' unless target_logits is");
  } else {
    check.require(target_logits.has_value(), "target_logits is None, must be given with method '" + method + "'");
    check.require(!target_argmax, "target_argmax is given, must be None with method '" + method + "'");
  }
  check.tensor("target_logits", target_logits, "T V", kActivations, Layout::last_contiguous);
  if (target_logits) check.at_least("target_logits' vocabulary", target_logits->size(1), 1);
  check.tensor("target_argmax", target_argmax, "T", kInt64, Layout::contiguous);
  if (method == "greedy") {
    check.require(!draft_probs, "draft_probs is given, must be None with method 'greedy'");
  } else {
    check.tensor("draft_probs", draft_probs, "R N V", kFloat32, Layout::last_contiguous);
    check.require(seeds.has_value(), "seeds is None, must be given with method '" + method + "'");
    check.require(offsets.has_value(), "offsets is None, must be given with method '" + method + "'");
    check.tensor("seeds", seeds, "R", kInt64, Layout::contiguous);
    check.tensor("offsets", offsets, "R", kInt64, Layout::contiguous);
  }
}

}  // namespace carryover_kernels
