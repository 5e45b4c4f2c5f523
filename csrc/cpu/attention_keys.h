// What one part of block_attention works on: its scratch memory, and where the keys of a step lie.
#pragma once

#include "key_list.h"
#include "tile.h"

namespace carryover_kernels {
namespace {

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Keys a step. In float32 the probabilities of 64 rows x 128 keys stay in L1; bf16 halves them and amortises the AMX tile stores.
constexpr int64_t keys_a_step(bool bf16) { return bf16 ? kKeyTile : kKeyTile / 2; }

// bf16 products where every operand is exact in bf16; everything else in float32.
static inline bool attention_in_bf16(const AttentionArgs& args) {
  if (!kHasDot || args.type != Elem::bf16) return false;
  if (args.cache_type == Elem::f32 || args.cache_type == Elem::f16) return false;
  return !args.carry_k || args.carry_type == Elem::bf16;
}

struct AttentionWork {
  bool bf16;
  int64_t width;  // head dim, padded for bf16
  int64_t row_bytes;   // from one copied row to the next
  int64_t pair_bytes;  // from one pair of value rows to the next
  int64_t tiles, step_keys, num_heads;
  char *all_q, *k_rows, *v_rows, *zero_row;
  float *scores, *all_out, *all_m, *all_d;
  // Those of the head at hand.
  int64_t head;
  char* q;
  float *out, *m, *d;
  char *probabilities, *v_pairs;
  float *key_scale, *v_scale;
  int32_t *first_row, *last_row;
  const char **k_at, **v_at;
  // Rows of the next step, to be prefetched while this one computes: with a page's heads side by side a head's rows lie kilobytes
  // apart, too far for the hardware to follow.
  const char **k_ahead, **v_ahead;
  int64_t num_ahead, ahead_bytes;
};

static inline int64_t attention_layout(const AttentionArgs& args, int64_t num_heads, char* base, AttentionWork& work) {
  work.bf16 = attention_in_bf16(args);
  work.width = work.bf16 ? round_up(args.head_dim, 32) : args.head_dim;
  work.tiles = kRowTile / kLanes;
  work.step_keys = keys_a_step(work.bf16);
  work.num_heads = num_heads;
  // A step of 64 bytes beyond a power of two: rows that are read side by side must not fall into the same few sets of L1.
  work.row_bytes = work.width * (work.bf16 ? 2 : 4) + (work.bf16 ? 0 : 64);
  work.pair_bytes = work.width * 4 + 64;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = base + used;
    used += round_up(bytes, 64);
    return at;
  };
  const int64_t keys = work.step_keys, row_bytes = work.width * (work.bf16 ? 2 : 4), lanes = work.tiles * kLanes;
  work.all_q = take(num_heads * lanes * row_bytes);
  work.k_rows = take(keys * work.row_bytes);
  work.v_rows = take(keys * work.row_bytes);
  work.zero_row = take(row_bytes);
  // Also the place of 16 rows on the way in and out.
  work.scores = reinterpret_cast<float*>(take((keys * lanes > work.width * kLanes ? keys * lanes : work.width * kLanes) * 4));
  work.all_out = reinterpret_cast<float*>(take(num_heads * lanes * work.width * 4));
  work.all_m = reinterpret_cast<float*>(take(num_heads * lanes * 4));
  work.all_d = reinterpret_cast<float*>(take(num_heads * lanes * 4));
  work.probabilities = work.bf16 ? take(lanes * keys * 2) : reinterpret_cast<char*>(work.scores);
  work.v_pairs = work.bf16 ? take(keys / 2 * work.pair_bytes) : nullptr;
  work.key_scale = reinterpret_cast<float*>(take(keys * 4));
  work.v_scale = reinterpret_cast<float*>(take(keys * 4));
  work.first_row = reinterpret_cast<int32_t*>(take(keys * 4));
  work.last_row = reinterpret_cast<int32_t*>(take(keys * 4));
  work.k_at = reinterpret_cast<const char**>(take(keys * 8));
  work.v_at = reinterpret_cast<const char**>(take(keys * 8));
  work.k_ahead = reinterpret_cast<const char**>(take(keys * 8));
  work.v_ahead = reinterpret_cast<const char**>(take(keys * 8));
  work.num_ahead = 0;
  return used;
}

static int64_t attention_workspace(const AttentionArgs& args, int64_t num_heads) {
  AttentionWork work;
  return attention_layout(args, num_heads, nullptr, work) + 64;
}

static inline void take_head(AttentionWork& work, int64_t first_head, int64_t index) {
  const int64_t lanes = work.tiles * kLanes;
  work.head = first_head + index;
  work.q = work.all_q + index * lanes * work.width * (work.bf16 ? 2 : 4);
  work.out = work.all_out + index * lanes * work.width;
  work.m = work.all_m + index * lanes, work.d = work.all_d + index * lanes;
}

static inline const char* offset_of(const void* base, int64_t elements, Elem type) {
  return static_cast<const char*>(base) + elements * elem_size(type);
}

// A row as the products want it. bf16: itself where it has the right type and width, else a converted, zero-padded copy. float32: always a
// copy, since products read rows again and again, and a cache's rows lie a multiple of 4 KB apart as often as not.
static inline const char* usable_row(const AttentionArgs& args, const AttentionWork& work, const char* row, Elem type, char* copy) {
  if (work.bf16) {
    if (type == Elem::bf16 && work.width == args.head_dim) return row;
    uint16_t* to = reinterpret_cast<uint16_t*>(copy);
    if (type == Elem::bf16) {
      memcpy(to, row, static_cast<size_t>(args.head_dim) * 2);
    } else {
      fp8_to_bf16(to, reinterpret_cast<const uint8_t*>(row), type, args.head_dim);
    }
    memset(to + args.head_dim, 0, static_cast<size_t>(work.width - args.head_dim) * 2);
    return copy;
  }
  to_floats(reinterpret_cast<float*>(copy), row, type, args.head_dim);
  return copy;
}

struct KeyRun {
  const char *k, *v;  // null: nobody may look (a page that does not exist)
  int64_t k_step, v_step, count;
  Elem type;
  int64_t position, relative;  // of the first key, relative to block row 0
  const int64_t* positions;    // or one by one
  bool scaled;
};

// The longest stretch of keys from `index` on that lie evenly in memory, at most `most`.
static inline KeyRun key_run(const AttentionArgs& args, const KeyList& keys, int64_t request, int64_t head, int64_t index, int64_t most) {
  KeyRun run = {};
  if (index < keys.seen_committed) {
    const int64_t key = keys.first_committed + index, column = key / args.page_size, slot = key % args.page_size;
    const int64_t page = args.block_table[request * args.table_request + column];
    run.count = args.page_size - slot;
    if (run.count > keys.seen_committed - index) run.count = keys.seen_committed - index;
    run.type = args.cache_type;
    run.relative = key - keys.committed;
    run.scaled = true;
    if (page >= 0 && page < args.pages) {
      run.k = offset_of(args.k_cache, page * args.kc_page + slot * args.kc_slot + head * args.kc_head, run.type);
      run.v = offset_of(args.v_cache, page * args.vc_page + slot * args.vc_slot + head * args.vc_head, run.type);
      run.k_step = args.kc_slot * elem_size(run.type);
      run.v_step = args.vc_slot * elem_size(run.type);
    }
  } else if (index < keys.seen_committed + keys.carried) {
    const int64_t row = index - keys.seen_committed;
    run.count = keys.carried - row;
    run.type = args.carry_type;
    run.relative = row;
    if (args.carry_positions) run.positions = args.carry_positions + keys.carry_slot * args.carry_capacity + row;
    run.k = offset_of(args.carry_k, keys.carry_slot * args.ck_slot + row * args.ck_row + head * args.ck_head, run.type);
    run.v = offset_of(args.carry_v, keys.carry_slot * args.cv_slot + row * args.cv_row + head * args.cv_head, run.type);
    run.k_step = args.ck_row * elem_size(run.type);
    run.v_step = args.cv_row * elem_size(run.type);
  } else {
    const int64_t row = index - keys.seen_committed - keys.carried;
    run.count = keys.block - row;
    run.type = args.type;
    run.relative = row;
    run.k = offset_of(args.k_block, request * args.kb_request + row * args.kb_row + head * args.kb_head, run.type);
    run.v = offset_of(args.v_block, request * args.vb_request + row * args.vb_row + head * args.vb_head, run.type);
    run.k_step = args.kb_row * elem_size(run.type);
    run.v_step = args.vb_row * elem_size(run.type);
  }
  if (run.count > most) run.count = most;
  return run;
}

// Fills the step's key pointers, scales and row ranges; the rest up to a multiple of 32 are keys that nobody sees.
// Returns that multiple; masked[g]: some row does not see some key of group g of 16.
static inline int64_t find_keys(
    const AttentionArgs& args, AttentionWork& work, const KeyList& keys, const AttentionPart& part, int64_t first, int64_t count,
    bool masked[kKeyTile / kLanes]) {
  const float scale = args.scale;
  const float cache_scale = scale * (args.k_scale ? *args.k_scale : 1.0f);
  const float v_scale = args.v_scale ? *args.v_scale : 1.0f;
  const int64_t padded = round_up(count, 32), row_bytes = work.row_bytes;
  for (int64_t group = 0; group < padded / kLanes; ++group) masked[group] = false;

  for (int64_t at = 0; at < count;) {
    const KeyRun run = key_run(args, keys, part.request, work.head, first + at, count - at);
    // Most keys are a stretch of pages that every row sees and that is read in place.
    const bool in_place = work.bf16 && work.width == args.head_dim && run.type == Elem::bf16;
    if (run.k && run.scaled && in_place && (args.window_left < 0 || args.rows - 1 - run.relative <= args.window_left)) {
      for (int64_t i = 0; i < run.count; ++i, ++at) {
        work.first_row[at] = 0, work.last_row[at] = static_cast<int32_t>(args.rows - 1);
        work.key_scale[at] = cache_scale, work.v_scale[at] = v_scale;
        work.k_at[at] = run.k + i * run.k_step, work.v_at[at] = run.v + i * run.v_step;
      }
      continue;
    }
    for (int64_t i = 0; i < run.count; ++i, ++at) {
      RowRange seen = {1, 0};
      if (run.k) {
        int64_t relative = run.relative + i;
        if (run.positions) relative = run.positions[i] - keys.start;
        seen = rows_seeing(relative, args.rows, args.causal, args.window_left, args.window_right);
      }
      work.first_row[at] = seen.first;
      work.last_row[at] = seen.last;
      work.key_scale[at] = run.scaled ? cache_scale : scale;
      work.v_scale[at] = run.scaled ? v_scale : 1.0f;
      if (seen.first > 0 || seen.last < args.rows - 1) masked[at / kLanes] = true;
      if (seen.first > seen.last) {
        work.k_at[at] = work.v_at[at] = work.zero_row;
      } else {
        work.k_at[at] = usable_row(args, work, run.k + i * run.k_step, run.type, work.k_rows + at * row_bytes);
        work.v_at[at] = usable_row(args, work, run.v + i * run.v_step, run.type, work.v_rows + at * row_bytes);
      }
    }
  }
  for (int64_t at = count; at < padded; ++at) {
    work.first_row[at] = 1, work.last_row[at] = 0;
    work.key_scale[at] = scale, work.v_scale[at] = 1.0f;
    work.k_at[at] = work.v_at[at] = work.zero_row;
    masked[at / kLanes] = true;
  }
  return padded;
}

// Notes where the rows of the next head (or of the next step's first head) lie. Block and carried rows are few and mostly warm: pages only.
static inline void look_ahead(
    const AttentionArgs& args, AttentionWork& work, const KeyList& keys, const AttentionPart& part, int64_t head, int64_t first) {
  int64_t last = keys.seen_committed < part.last_key ? keys.seen_committed : part.last_key;
  if (last > first + work.step_keys) last = first + work.step_keys;
  work.num_ahead = 0;
  work.ahead_bytes = args.head_dim * elem_size(args.cache_type);
  while (first < last) {
    const KeyRun run = key_run(args, keys, part.request, head, first, last - first);
    if (run.k)
      for (int64_t i = 0; i < run.count; ++i) {
        work.k_ahead[work.num_ahead] = run.k + i * run.k_step;
        work.v_ahead[work.num_ahead++] = run.v + i * run.v_step;
      }
    first += run.count;
  }
}

// Prefetches share `part` of `parts` of the noted rows into L2.
static inline void fetch_ahead(const AttentionWork& work, int64_t part, int64_t parts) {
  for (int64_t i = work.num_ahead * part / parts; i < work.num_ahead * (part + 1) / parts; ++i)
    for (int64_t byte = 0; byte < work.ahead_bytes; byte += 64) {
      __builtin_prefetch(work.k_ahead[i] + byte, 0, 2);
      __builtin_prefetch(work.v_ahead[i] + byte, 0, 2);
    }
}

}  // namespace
}  // namespace carryover_kernels
