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

inline void check_markov_sample(
    const Tensor& base_logits, const Tensor& anchor_tokens, const MaybeTensor& markov_w1, const MaybeTensor& markov_w2,
    const std::string& head, const MaybeTensor& hidden, const MaybeTensor& head_weight, const MaybeTensor& head_bias,
    const MaybeTensor& confidence_weight, const MaybeTensor& confidence_bias, const MaybeTensor& draft_to_target,
    const MaybeTensor& temperature, const MaybeTensor& seeds, const MaybeTensor& offsets) {
  Checker check("markov_sample");
  check.tensor("base_logits", base_logits, "R N V", kActivations, Layout::last_contiguous);
  check.at_least("base_logits' vocabulary", base_logits.size(2), 1);
  check.tensor("anchor_tokens", anchor_tokens, "R", kInt64, Layout::contiguous);
  check.one_of("head", head, {"none", "vanilla", "gated", "rnn"});
  const Dtypes weights = markov_w1 ? Dtypes{markov_w1->scalar_type()} : kActivations;
  if (head == "none") {
    check.require(!markov_w1, "markov_w1 is given with head 'none', must be None");
    check.require(!markov_w2, "markov_w2 is given with head 'none', must be None");
  } else {
    check.require(markov_w1.has_value(), "markov_w1 is None, must be given with head '" + head + "'");
    check.require(markov_w2.has_value(), "markov_w2 is None, must be given with head '" + head + "'");
    check.tensor("markov_w1", markov_w1, "Vt r", kActivations, Layout::contiguous);
    check.tensor("markov_w2", markov_w2, "V r", weights, Layout::contiguous);
  }
  const bool wide = head == "gated" || head == "rnn";
  check.require(
      hidden.has_value() || !(wide || confidence_weight),
      "hidden is None, must be given with a gated or rnn head or a confidence head");
  check.tensor("hidden", hidden, "R N H", kActivations, Layout::last_contiguous);
  const int64_t r = check.size("r"), h = check.size("H");
  if (wide) {
    check.require(head_weight.has_value(), "head_weight is None, must be given with head '" + head + "'");
    check.bind("head_rows", head == "gated" ? r : 3 * r);
    check.bind("head_columns", head == "gated" ? h + r : 2 * r + h);
    check.tensor("head_weight", head_weight, "head_rows head_columns", weights, Layout::contiguous);
    check.tensor("head_bias", head_bias, "head_rows", kFloat32, Layout::contiguous);
  } else {
    check.require(!head_weight, "head_weight is given with head '" + head + "', must be None");
  }
  if (confidence_weight) {
    check.tensor("confidence_weight", confidence_weight, "1 width", kFloat32, Layout::contiguous);
    const int64_t width = check.size("width");
    check.require(width == h || width == h + r, [&] {
      return "confidence_weight has " + std::to_string(width) + " columns, must have " + std::to_string(h) + " (hidden) or " +
          std::to_string(h + r) + " (hidden and markov_w1 row)";
    });
  }
  check.tensor("confidence_bias", confidence_bias, "1", kFloat32, Layout::contiguous);
  check.tensor("draft_to_target", draft_to_target, "V", kInt64, Layout::contiguous);
  check.tensor("temperature", temperature, "R", kFloat32, Layout::contiguous);
  if (temperature) {
    check.together({{"temperature", true}, {"seeds", seeds.has_value()}, {"offsets", offsets.has_value()}});
    check.tensor("seeds", seeds, "R", kInt64, Layout::contiguous);
    check.tensor("offsets", offsets, "R", kInt64, Layout::contiguous);
  }
}

inline void check_project_states(
    const Tensor& states, const MaybeTensor& fc_weight, const Tensor& kv_weight, const MaybeTensor& kv_bias,
    const MaybeTensor& k_norm_weight, const MaybeTensor& mark, const MaybeTensor& mark_kv,
    const Tensor& rope_table, const Tensor& row_cache_slot, const Tensor& row_carry_slot, const Tensor& row_position,
    const std::vector<Tensor>& k_cache, const std::vector<Tensor>& v_cache, const MaybeTensor& carry_k,
    const MaybeTensor& carry_v, double norm_eps, double k_norm_eps, bool share_kv, const MaybeTensor& k_scale, const MaybeTensor& v_scale) {
  Checker check("project_states");
  check.tensor("states", states, "T F", kActivations, Layout::last_contiguous);
  const Dtypes same = {states.scalar_type()};
  if (fc_weight) {
    check.tensor("fc_weight", fc_weight, "H F", same, Layout::contiguous);
  } else {
    check.bind("H", states.size(1));
  }
  check.tensor("kv_weight", kv_weight, "W H", same, Layout::contiguous);
  check.tensor("kv_bias", kv_bias, "W", kFloat32, Layout::contiguous);
  const int64_t layers = static_cast<int64_t>(k_cache.size());
  check.require(layers >= 1, "k_cache has 0 layers, must have at least 1");
  check.require(v_cache.size() == k_cache.size(), [&] {
    return "v_cache has " + std::to_string(v_cache.size()) + " layers, must have " + std::to_string(layers) + " as k_cache has";
  });
  check.bind("L", layers);
  if (k_cache[0].dim() == 4) {
    check.bind("Hkv", k_cache[0].size(2));
    check.bind("D", k_cache[0].size(3));
    const int64_t sources = share_kv ? 1 : 2, wanted = layers * sources * k_cache[0].size(2) * k_cache[0].size(3);
    check.require(kv_weight.size(0) == wanted, [&] {
      return "kv_weight has " + std::to_string(kv_weight.size(0)) + " rows, must have " + std::to_string(wanted) + ": L * " +
             std::to_string(sources) + " * Hkv * D";
    });
  }
  check.tensor("k_norm_weight", k_norm_weight, "L D", kFloat32, Layout::contiguous);
  check.tensor("mark", mark, "H", kFloat32, Layout::contiguous);
  check.tensor("mark_kv", mark_kv, "W", kFloat32, Layout::contiguous);
  check.require(!mark || !mark_kv, "mark_kv is given beside mark, must be None: the mark has one place");
  check.tensor("rope_table", rope_table, "max_position rotary_dim", kFloat32, Layout::contiguous);
  check.tensor("row_cache_slot", row_cache_slot, "T", kInt64, Layout::contiguous);
  check.tensor("row_carry_slot", row_carry_slot, "T", kInt64, Layout::contiguous);
  check.tensor("row_position", row_position, "T", kInt64, Layout::contiguous);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string index = "[" + std::to_string(layer) + "]";
    check.tensor("k_cache" + index, k_cache[layer], "pages page Hkv D", kCaches, Layout::last_contiguous);
    check.tensor("v_cache" + index, v_cache[layer], "pages page Hkv D", {k_cache[0].scalar_type()}, Layout::last_contiguous);
    check.require(k_cache[layer].scalar_type() == k_cache[0].scalar_type(), [&] {
      return "k_cache" + index + " has dtype torch." + dtype_name(k_cache[layer].scalar_type()) + ", must be torch." +
             dtype_name(k_cache[0].scalar_type()) + " as k_cache[0] is";
    });
  }
  const int64_t rotary_dim = rope_table.size(1), head_dim = check.size("D");
  check.require(rotary_dim % 2 == 0 && rotary_dim > 0 && rotary_dim <= head_dim, [&] {
    return "rope_table has " + std::to_string(rotary_dim) + " columns, must be even and at most the head dim " + std::to_string(head_dim);
  });
  check.together({{"carry_k", carry_k.has_value()}, {"carry_v", carry_v.has_value()}});
  if (carry_k) {
    check.tensor("carry_k", carry_k, "L slots C Hkv D", kActivations, Layout::last_contiguous);
    check.tensor("carry_v", carry_v, "L slots C Hkv D", {carry_k->scalar_type()}, Layout::last_contiguous);
  }
  check.finite_and_not_negative("norm_eps", norm_eps);
  check.finite_and_not_negative("k_norm_eps", k_norm_eps);
  check.tensor("k_scale", k_scale, "L", kFloat32, Layout::contiguous);
  check.tensor("v_scale", v_scale, "L", kFloat32, Layout::contiguous);
}

inline void check_block_attention(
    const Tensor& q, const Tensor& k_block, const Tensor& v_block, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
    const Tensor& seq_lens, const MaybeTensor& carry_k, const MaybeTensor& carry_v,
    const MaybeTensor& carry_lens, const MaybeTensor& carry_slot_ids, const MaybeTensor& block_start,
    const MaybeTensor& carry_positions, std::optional<double> scale, int64_t window_left, int64_t window_right,
    const MaybeTensor& sinks, double softcap, const MaybeTensor& k_scale, const MaybeTensor& v_scale, int64_t num_splits) {
  Checker check("block_attention");
  check.tensor("q", q, "R B Hq D", kActivations, Layout::last_contiguous);
  const Dtypes same = {q.scalar_type()};
  check.tensor("k_block", k_block, "R Bk Hkv D", same, Layout::last_contiguous);
  const int64_t rows = q.size(1), key_rows = k_block.size(1), q_heads = q.size(2), kv_heads = k_block.size(2);
  check.require(key_rows == 0 || key_rows == rows, [&] {
    return "k_block has " + std::to_string(key_rows) + " rows a request, must have " + std::to_string(rows) + " as q has, or 0";
  });
  check.require(kv_heads > 0 && q_heads % kv_heads == 0, [&] {
    return "k_block has " + std::to_string(kv_heads) + " heads, must divide the " + std::to_string(q_heads) + " heads of q";
  });
  check.tensor("v_block", v_block, "R Bk Hkv D", same, Layout::last_contiguous);
  check.tensor("k_cache", k_cache, "pages page Hkv D", kCaches, Layout::last_contiguous);
  check.tensor("v_cache", v_cache, "pages page Hkv D", {k_cache.scalar_type()}, Layout::last_contiguous);
  check.at_least("k_cache's page size", k_cache.size(1), 1);
  check.tensor("block_table", block_table, "R P", kInt32, Layout::last_contiguous);
  check.tensor("seq_lens", seq_lens, "R", kInt32, Layout::contiguous);
  check.together(
      {{"carry_k", carry_k.has_value()}, {"carry_v", carry_v.has_value()}, {"carry_lens", carry_lens.has_value()},
       {"carry_slot_ids", carry_slot_ids.has_value()}});
  if (carry_k) {
    check.tensor("carry_k", carry_k, "slots C Hkv D", kActivations, Layout::last_contiguous);
    check.tensor("carry_v", carry_v, "slots C Hkv D", {carry_k->scalar_type()}, Layout::last_contiguous);
    check.tensor("carry_lens", carry_lens, "slots", kInt32, Layout::contiguous);
    check.tensor("carry_slot_ids", carry_slot_ids, "R", kInt32, Layout::contiguous);
  }
  check.tensor("block_start", block_start, "R", kInt64, Layout::contiguous);
  check.tensor("carry_positions", carry_positions, "slots C", kInt64, Layout::contiguous);
  if (scale) check.finite("scale", *scale);
  check.at_least("window_left", window_left, -1);
  check.at_least("window_right", window_right, -1);
  check.tensor("sinks", sinks, "Hq", kFloat32, Layout::contiguous);
  check.finite_and_not_negative("softcap", softcap, " (0 = off)");
  check.tensor("k_scale", k_scale, "1", kFloat32);
  check.tensor("v_scale", v_scale, "1", kFloat32);
  check.at_least("num_splits", num_splits, 0);
}

}  // namespace carryover_kernels
