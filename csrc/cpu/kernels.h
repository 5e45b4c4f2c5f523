// What the doors ask of the code that is compiled once per instruction set (kernels.cpp): plain structs and one table of functions.
// No torch here. All strides are in elements unless they say bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/scalar.h"

namespace carryover_kernels {

// Rows that one attention part carries through all its keys: 16 block rows times 4 heads.
constexpr int64_t kRowTile = 64;
// Keys between two updates of the running maximum.
constexpr int64_t kKeyTile = 256;

struct AttentionArgs {
  // Outputs: contiguous. lse may be null.
  void* out;
  float* lse;

  const void *q, *k_block, *v_block, *k_cache, *v_cache, *carry_k, *carry_v;
  Elem type, cache_type, carry_type;

  const int32_t *block_table, *seq_lens, *carry_lens, *carry_slot_ids;
  const int64_t *block_start, *carry_positions;
  const float *sinks, *k_scale, *v_scale;

  int64_t q_request, q_row, q_head;
  int64_t kb_request, kb_row, kb_head, vb_request, vb_row, vb_head;
  int64_t kc_page, kc_slot, kc_head, vc_page, vc_slot, vc_head;
  int64_t ck_slot, ck_row, ck_head, cv_slot, cv_row, cv_head;
  int64_t table_request;

  int64_t requests, rows, key_rows, q_heads, kv_heads, head_dim;  // key_rows: rows of k_block, `rows` or 0
  int64_t pages, page_size, table_width, carry_slots, carry_capacity;

  float scale, softcap;
  bool causal;
  int64_t window_left, window_right;
};

// KV heads first_head.., rows first_row.. of each one's group*rows query rows, keys first_key..last_key-1 of the request's key list.
struct AttentionPart {
  int64_t request, first_head, num_heads, first_row, num_rows, first_key, last_key;
  // Where the part is not the whole key list: unnormalised output [num_heads, kRowTile, head_dim] and state [.., 2]; else null.
  float *partial_out, *partial_state;
};

struct ProjectArgs {
  const void *states, *fc_weight, *kv_weight;  // fc_weight null: states are fc's output
  Elem type;
  const float *kv_bias, *k_norm_weight, *mark, *mark_kv, *rope_table;
  const int64_t *row_cache_slot, *row_carry_slot, *row_position;

  // One entry a layer.
  void* const* k_cache;
  void* const* v_cache;
  const int64_t* cache_strides;  // [L, 6]: k page, slot, head, v page, slot, head
  Elem cache_type;
  void *carry_k, *carry_v;
  Elem carry_type;
  int64_t ck_layer, ck_slot, ck_row, ck_head, cv_layer, cv_slot, cv_row, cv_head;
  const float *k_scale, *v_scale;

  int64_t rows, states_row, features, hidden, layers, kv_heads, head_dim, rotary_dim;
  int64_t page_size, carry_capacity;
  float norm_eps, k_norm_eps;
  bool neox, share_kv, v_norm, rope_parity;

  // Rows that are stored somewhere, in order; the others never enter a product.
  const int64_t* active;
  int64_t num_active;
  const uint8_t *in_pages, *in_carry;  // [num_active]

  // Scratch from the door; sizes in bytes from project_sizes.
  void *packed_states, *packed_hidden;
  float *partial_squares;  // [fc units or 1, lanes]
  float *inverse_rms;      // [lanes]
  float *rotation;         // [rotary_dim, lanes], cos then sin, lanes = active rows
};

struct ProjectSizes {
  int64_t packed_states, packed_hidden, lanes, pack_units, fc_units, kv_units;
};

struct QkNormRopeArgs {
  void *q, *k, *v;
  const void* qkv;
  Elem type;
  const int64_t* positions;
  const float *rope_table, *q_norm_weight, *k_norm_weight;
  int64_t rows, qkv_row, q_heads, kv_heads, head_dim, max_position, rotary_dim;
  float eps;
  bool neox, share_kv, v_norm, rope_parity;
};

struct KernelTable {
  const char* name;

  // One part of block_attention. workspace: attention_workspace bytes, 64-byte aligned, one a thread.
  int64_t (*attention_workspace)(const AttentionArgs&, int64_t num_heads);
  void (*attention_part)(const AttentionArgs&, const AttentionPart&, void* workspace);
  // Merges `count` parts of the same heads and rows, which lie one behind another, and stores the rows.
  void (*attention_merge)(const AttentionArgs&, const AttentionPart&, int64_t count);

  // project_states in three sweeps of independent units, a barrier between: pack states, fc, K/V with the whole epilogue.
  ProjectSizes (*project_sizes)(const ProjectArgs&);
  int64_t (*project_workspace)(const ProjectArgs&);
  void (*project_pack)(const ProjectArgs&, int64_t unit, void* workspace);
  void (*project_fc)(const ProjectArgs&, int64_t unit, void* workspace);
  void (*project_norms)(const ProjectArgs&);
  void (*project_kv)(const ProjectArgs&, int64_t unit, void* workspace);

  void (*qk_norm_rope)(const QkNormRopeArgs&, int64_t first_row, int64_t last_row);

  // out[i] = row i of a contiguous [count, columns] matrix (f32, bf16 or f16) times x.
  void (*dot_rows)(const void* rows, Elem type, int64_t count, int64_t columns, const float* x, float* out);

  // Called by each thread before and after its units: tile registers are state of the thread.
  void (*enter)();
  void (*leave)();
};

// Keys of (request): what parts are cut from. The same walk as attention_part's.
int64_t attention_keys(const AttentionArgs&, int64_t request);

}  // namespace carryover_kernels
