// The ops as C++ functions on PyTorch's stable-ABI tensors, one an op, with the arguments and defaults of its schema.
// What each does is written in carryover_kernels/ops/{op}.py, by example in docs/ops.md. Functions of namespace cpu take CPU tensors and
// throw std::runtime_error with one sentence (op: argument was X, must be Y) for one that they refuse; none of them syncs or keeps state.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#define CARRYOVER_API __attribute__((visibility("default")))

namespace carryover_kernels::cpu {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// row_cache_slot, row_carry_slot, row_position, block_start. Writes carry_lens and carry_positions.
CARRYOVER_API std::tuple<Tensor, Tensor, Tensor, Tensor> plan_round(
    Tensor query_start_loc, Tensor num_rejected, Tensor positions, Tensor slot_mapping, Tensor carry_slot_ids, Tensor carry_lens,
    int64_t carry_capacity, OptionalTensor carry_positions = std::nullopt);

// Writes k_cache, v_cache, carry_k and carry_v at the named slots.
CARRYOVER_API void project_states(
    Tensor states, OptionalTensor fc_weight, Tensor kv_weight, OptionalTensor kv_bias, OptionalTensor k_norm_weight, OptionalTensor mark,
    OptionalTensor mark_kv, Tensor rope_table, Tensor row_cache_slot, Tensor row_carry_slot, Tensor row_position,
    std::vector<Tensor> k_cache, std::vector<Tensor> v_cache, OptionalTensor carry_k = std::nullopt,
    OptionalTensor carry_v = std::nullopt, double norm_eps = 1e-6, double k_norm_eps = 1e-6, bool neox = true, bool share_kv = false,
    bool v_norm = false, bool rope_parity = false, OptionalTensor k_scale = std::nullopt, OptionalTensor v_scale = std::nullopt);

// q, k, v.
CARRYOVER_API std::tuple<Tensor, Tensor, Tensor> qk_norm_rope(
    Tensor qkv, Tensor positions, Tensor rope_table, OptionalTensor q_norm_weight, OptionalTensor k_norm_weight, int64_t num_q_heads,
    int64_t num_kv_heads, double eps = 1e-6, bool neox = true, bool share_kv = false, bool v_norm = false, bool rope_parity = false);

// out, lse.
CARRYOVER_API std::tuple<Tensor, Tensor> block_attention(
    Tensor q, Tensor k_block, Tensor v_block, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
    OptionalTensor carry_k = std::nullopt, OptionalTensor carry_v = std::nullopt, OptionalTensor carry_lens = std::nullopt,
    OptionalTensor carry_slot_ids = std::nullopt, OptionalTensor block_start = std::nullopt,
    OptionalTensor carry_positions = std::nullopt, std::optional<double> scale = std::nullopt, bool causal = false,
    int64_t window_left = -1, int64_t window_right = -1, OptionalTensor sinks = std::nullopt, double softcap = 0.0,
    OptionalTensor k_scale = std::nullopt, OptionalTensor v_scale = std::nullopt, int64_t num_splits = 0, bool return_lse = false);

// row_slot, block_slot, lengths.
CARRYOVER_API std::tuple<Tensor, Tensor, Tensor> carry_to_pages(
    Tensor row_cache_slot, Tensor row_carry_slot, Tensor query_start_loc, Tensor block_table, Tensor seq_lens, int64_t page_size,
    int64_t num_block_rows, OptionalTensor slot_capacity = std::nullopt);

// tokens, logits, probs, confidence.
CARRYOVER_API std::tuple<Tensor, Tensor, Tensor, Tensor> markov_sample(
    Tensor base_logits, Tensor anchor_tokens, OptionalTensor markov_w1 = std::nullopt, OptionalTensor markov_w2 = std::nullopt,
    std::string head = "none", OptionalTensor hidden = std::nullopt, OptionalTensor head_weight = std::nullopt,
    OptionalTensor head_bias = std::nullopt, OptionalTensor confidence_weight = std::nullopt,
    OptionalTensor confidence_bias = std::nullopt, OptionalTensor draft_to_target = std::nullopt,
    OptionalTensor temperature = std::nullopt, OptionalTensor seeds = std::nullopt, OptionalTensor offsets = std::nullopt,
    bool return_logits = false, bool return_probs = false);

// num_accepted, next_token, num_rejected.
CARRYOVER_API std::tuple<Tensor, Tensor, Tensor> verify_draft(
    Tensor draft_tokens, Tensor query_start_loc, OptionalTensor target_logits = std::nullopt,
    OptionalTensor target_argmax = std::nullopt, OptionalTensor draft_probs = std::nullopt, OptionalTensor seeds = std::nullopt,
    OptionalTensor offsets = std::nullopt, std::string method = "greedy");

// Writes carry_lens.
CARRYOVER_API void clear_carry(Tensor carry_slot_ids, Tensor carry_lens);

}  // namespace carryover_kernels::cpu
