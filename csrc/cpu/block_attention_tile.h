// One part of block_attention: 64 query rows of one (request, KV head) against a range of the request's keys.
// Scores are kept transposed, [row tile][key][16 rows]: a key from the cache is the broadcast (or AMX A) operand and is read where it
// lies, and the softmax goes down columns. Nothing is gathered but keys that lie apart in memory, 16 at a time, for AMX.
#pragma once

#include <cmath>

#include "amx.h"
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

static void pack_queries(const AttentionArgs& args, const AttentionWork& work, const AttentionPart& part, int64_t tiles) {
  const int64_t group = args.q_heads / args.kv_heads;
  const int64_t columns = work.bf16 ? work.width / 2 : work.width;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const uint32_t* rows[16];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t index = tile * kLanes + lane, row = part.first_row + index;
      rows[lane] = nullptr;
      if (index >= part.num_rows) continue;
      const int64_t at =
          part.request * args.q_request + row / group * args.q_row + (work.head * group + row % group) * args.q_head;
      // The probabilities' and scores' space is free before the first step: converted rows go there.
      char* copy = reinterpret_cast<char*>(work.scores) + lane * work.width * 4;
      rows[lane] = reinterpret_cast<const uint32_t*>(usable_row(args, work, offset_of(args.q, at, args.type), args.type, copy));
    }
    pack_lanes(reinterpret_cast<uint32_t*>(work.q) + tile * columns * kLanes, kLanes, rows, columns);
  }
}

// [pair of keys][width] of 32 bits, (key 2p, key 2p + 1) in the low and high half.
static void pack_value_pairs(const AttentionWork& work, int64_t keys) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int64_t key = 0; key < keys; key += 2) {
    const char *even = work.v_at[key], *odd = work.v_at[key + 1];
    char* to = work.v_pairs + key / 2 * work.pair_bytes;
    for (int64_t d = 0; d < work.width; d += 32) {
      const __m512i a = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(even + d * 2));
      const __m512i b = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(odd + d * 2));
      _mm512_storeu_si512(to + d * 4, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(to + d * 4 + 64, _mm512_unpackhi_epi16(a, b));
    }
  }
#else
  (void)work, (void)keys;
#endif
}

static void score_keys(AttentionWork& work, int64_t tiles, int64_t keys) {
#if defined(__AMX_BF16__)
  if (work.bf16) {
    const int64_t row_bytes = work.width * 2, steps = work.width / 32, q_tile = work.width / 2 * kLanes * 4;
    for (int64_t group = 0; group < keys; group += kLanes) {
      const char** at = work.k_at + group;
      const char* rows = at[0];
      int64_t stride = at[1] - at[0];
      bool even = true;
      for (int i = 2; i < kLanes; ++i) even &= at[i] - at[i - 1] == stride;
      if (!even) {
        char* copies = work.k_rows + group * row_bytes;
        for (int i = 0; i < kLanes; ++i)
          if (at[i] != copies + i * row_bytes) memcpy(copies + i * row_bytes, at[i], static_cast<size_t>(row_bytes));
        rows = copies, stride = row_bytes;
      }
      float* scores = work.scores + group * kLanes;
      const int64_t scores_tile = work.step_keys * kLanes;
      switch (tiles) {
        case 1: amx_row<1>(rows, stride, work.q, q_tile, scores, scores_tile, steps); break;
        case 2: amx_row<2>(rows, stride, work.q, q_tile, scores, scores_tile, steps); break;
        case 3: amx_row<3>(rows, stride, work.q, q_tile, scores, scores_tile, steps); break;
        default: amx_row<4>(rows, stride, work.q, q_tile, scores, scores_tile, steps);
      }
    }
    return;
  }
#endif
  const float* q = reinterpret_cast<const float*>(work.q);
  const auto key = [&](int64_t row, int64_t k) { return work.k_at[row] + k * 4; };
  const int64_t columns = work.bf16 ? work.width / 2 : work.width, scores_tile = work.step_keys * kLanes;
  if (work.bf16) {
    product<kHasDot>(work.scores, scores_tile, tiles, keys, key, q, columns * kLanes, 0, columns, false);
  } else {
    product<false>(work.scores, scores_tile, tiles, keys, key, q, columns * kLanes, 0, columns, false);
  }
}

// Softcap and masks of one tile of rows, where there are any: scores become final, with a key scale of 1.
static void settle_scores(
    const AttentionArgs& args, const AttentionWork& work, float* scores, const int32_t* rows_of_lanes, int64_t keys, const bool* masked,
    float* scales) {
  const VecF hidden = splat(-__builtin_inff());
  const VecI row = load_int(rows_of_lanes);
  for (int64_t group = 0; group < keys / kLanes; ++group) {
    if (!masked[group] && args.softcap == 0) continue;
    for (int64_t key = group * kLanes; key < (group + 1) * kLanes; ++key) {
      VecF s = load(scores + key * kLanes) * splat(work.key_scale[key]);
      if (args.softcap > 0) s = tanh_of(s / splat(args.softcap)) * splat(args.softcap);
      const VecI seen = at_most(splat_int(work.first_row[key]), row) & at_most(row, splat_int(work.last_row[key]));
      store(scores + key * kLanes, select(seen, s, hidden));
      scales[key] = 1.0f;
    }
  }
}

// Two rows of probabilities as pairs of bf16 in 16 lanes.
static inline VecI pair_of(VecF even, VecF odd) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  VecI v;
  v.p[0] = (NativeI)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd.p[0], (__m512)even.p[0]));
  return v;
#else
  (void)odd;
  return bits(even);
#endif
}

// Scores of one tile of rows become probabilities; the state and the output so far are brought to the new maximum.
static void soften(
    const AttentionArgs& args, AttentionWork& work, int64_t tile, int64_t tiles, const int32_t* rows_of_lanes, int64_t keys,
    const bool* masked, bool any_masked, bool first) {
  float* scores = work.scores + tile * work.step_keys * kLanes;
  float own_scales[kKeyTile];
  const float* scales = work.key_scale;
  if (any_masked || args.softcap > 0) {
    memcpy(own_scales, work.key_scale, static_cast<size_t>(keys) * 4);
    settle_scores(args, work, scores, rows_of_lanes, keys, masked, own_scales);
    scales = own_scales;
  }

  const VecF before = load(work.m + tile * kLanes);
  VecF highest[4] = {before, before, before, before};  // four chains: a maximum takes four cycles
  for (int64_t key = 0; key < keys; key += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      highest[i] = maximum(load(scores + (key + i) * kLanes) * splat(scales[key + i]), highest[i]);
  const VecF m = maximum(maximum(highest[0], highest[1]), maximum(highest[2], highest[3]));
  const VecF empty = splat(-__builtin_inff());
  const VecF shift = select(equal(m, empty), splat(0.0f), m);  // softmax_shift
  const VecF factor = exp_of(before - shift);
  store(work.m + tile * kLanes, m);

  VecF sum[2] = {splat(0.0f), splat(0.0f)};
  const bool scaled = args.v_scale != nullptr;
  const auto probability = [&](int64_t key) {
    VecF s = load(scores + key * kLanes), scale = splat(scales[key]);
    VecF p = exp_of(s * scale - shift);
    sum[key & 1] = sum[key & 1] + p;
    return scaled ? p * splat(work.v_scale[key]) : p;
  };
  if (!work.bf16) {
    for (int64_t key = 0; key < keys; key += 32) {
      fetch_ahead(work, (tile * keys + key) / 32, tiles * keys / 32);
      for (int64_t i = key; i < key + 32; i += 2) {
        const VecF a = probability(i), b = probability(i + 1);
        store(scores + i * kLanes, a), store(scores + (i + 1) * kLanes, b);
      }
    }
  } else {
    int32_t* to = reinterpret_cast<int32_t*>(work.probabilities) + tile * work.step_keys / 2 * kLanes;
    for (int64_t key = 0; key < keys; key += 32) {
      fetch_ahead(work, (tile * keys + key) / 32, tiles * keys / 32);
#if defined(__AMX_BF16__)
      // AMX wants the rows' probabilities as A: rows of 32 keys, the transpose of the 16 pairs.
      __m512i pairs[16];
      for (int i = 0; i < 16; ++i) {
        const VecF a = probability(key + 2 * i), b = probability(key + 2 * i + 1);
        pairs[i] = (__m512i)pair_of(a, b).p[0];
      }
      transpose16(pairs);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + key / 2 * kLanes + i * 16, pairs[i]);
#else
      for (int i = 0; i < 16; ++i) {
        const VecF a = probability(key + 2 * i), b = probability(key + 2 * i + 1);
        store_int(to + (key / 2 + i) * kLanes, pair_of(a, b));
      }
#endif
    }
  }
  store(work.d + tile * kLanes, mul_add(load(work.d + tile * kLanes), factor, sum[0] + sum[1]));
  if (first) return;

  float factors[kLanes];
  store(factors, factor);
  bool moved = false;
  for (int lane = 0; lane < kLanes; ++lane) moved |= factors[lane] != 1.0f;
  if (!moved) return;
  if (work.bf16 && kHasAmx) {  // out is [row][width]
    for (int lane = 0; lane < kLanes; ++lane) {
      if (factors[lane] == 1.0f) continue;
      float* row = work.out + (tile * kLanes + lane) * work.width;
      for (int64_t d = 0; d < work.width; d += kLanes) store(row + d, load(row + d) * splat(factors[lane]));
    }
  } else {  // out is lane-packed
    float* out = work.out + tile * work.width * kLanes;
    for (int64_t d = 0; d < work.width; ++d) store(out + d * kLanes, load(out + d * kLanes) * factor);
  }
}

static void add_values(AttentionWork& work, int64_t tiles, int64_t keys, bool first) {
  if (work.bf16) pack_value_pairs(work, keys);
#if defined(__AMX_BF16__)
  if (work.bf16) {
    for (int64_t d = 0; d < work.width; d += 32) {
      AmxOperand b = {};
      b.step = 16 * work.pair_bytes;
      for (int half = 0; half < 2; ++half) b.at[half] = work.v_pairs + (d + half * kLanes) * 4, b.stride[half] = work.pair_bytes;
      for (int64_t tile = 0; tile < tiles; tile += 2) {
        const int a_tiles = tiles - tile < 2 ? 1 : 2;
        AmxOperand a = {};
        AmxResult c = {};
        a.step = 1024;
        c.stride = work.width * 4;
        for (int t = 0; t < 2; ++t) {
          a.at[t] = work.probabilities + (tile + t) * work.step_keys / 2 * kLanes * 4, a.stride[t] = 64;
          for (int half = 0; half < 2; ++half) c.at[t][half] = work.out + (tile + t) * kLanes * work.width + d + half * kLanes;
        }
        amx_product(a, a_tiles, b, 2, c, keys / 32, !first);
      }
    }
    return;
  }
#endif
  const float* p = reinterpret_cast<const float*>(work.probabilities);
  const int64_t out_tile = work.width * kLanes;
  if (work.bf16) {
    const auto value = [&](int64_t d, int64_t pair) { return work.v_pairs + pair * work.pair_bytes + d * 4; };
    product<kHasDot>(work.out, out_tile, tiles, work.width, value, p, work.step_keys / 2 * kLanes, 0, keys / 2, !first);
  } else {
    const auto value = [&](int64_t d, int64_t key) { return work.v_at[key] + d * 4; };
    product<false>(work.out, out_tile, tiles, work.width, value, p, work.step_keys * kLanes, 0, keys, !first);
  }
}

// Natural units, unlike online_softmax.h's log2: the float32 lse would lose a bit in scaling there and back.
static inline float weight_of(float m, float highest) { return m == -__builtin_inff() ? 0.0f : expf(m - highest); }

// Divides, adds the sink and stores one row; `values` is overwritten.
static void finish_row(const AttentionArgs& args, int64_t request, int64_t kv_head, int64_t row, float m, float d, float* values) {
  const int64_t group = args.q_heads / args.kv_heads, head = kv_head * group + row % group;
  const int64_t at = (request * args.rows + row / group) * args.q_heads + head;
  const bool empty = m == -__builtin_inff();
  float factor = 1.0f;
  if (args.sinks && !empty) {
    const float highest = args.sinks[head] > m ? args.sinks[head] : m;  // a large sink must not overflow
    factor = weight_of(m, highest);
    d = d * factor + weight_of(args.sinks[head], highest);
    m = highest;
  }
  factor /= d;
  for (int64_t i = 0; i < args.head_dim; ++i) values[i] = empty ? 0.0f : values[i] * factor;
  from_floats(static_cast<char*>(args.out) + at * args.head_dim * elem_size(args.type), args.type, values, args.head_dim);
  if (args.lse) args.lse[at] = empty ? m : m + logf(d);
}

// Row `index` of a head's row tiles, whole (`values`) or as a part of its keys.
static void put_row(
    const AttentionArgs& args, const AttentionPart& part, const AttentionWork& work, int64_t index, float* values) {
  if (!part.partial_out) {
    finish_row(args, part.request, work.head, part.first_row + index, work.m[index], work.d[index], values);
    return;
  }
  const int64_t at = (work.head - part.first_head) * kRowTile + index;
  memcpy(part.partial_out + at * args.head_dim, values, static_cast<size_t>(args.head_dim) * 4);
  part.partial_state[at * 2] = work.m[index], part.partial_state[at * 2 + 1] = work.d[index];
}

static void attention_part(const AttentionArgs& args, const AttentionPart& part, void* workspace) {
  AttentionWork work;
  char* base = static_cast<char*>(workspace);
  base += -reinterpret_cast<intptr_t>(base) & 63;
  attention_layout(args, part.num_heads, base, work);
  const KeyList keys = key_list(args, part.request);
  const int64_t tiles = (part.num_rows + kLanes - 1) / kLanes, group = args.q_heads / args.kv_heads;

  int32_t rows_of_lanes[kRowTile];
  for (int64_t i = 0; i < tiles * kLanes; ++i) rows_of_lanes[i] = static_cast<int32_t>((part.first_row + i) / group);
  memset(work.zero_row, 0, static_cast<size_t>(work.width * (work.bf16 ? 2 : 4)));
  for (int64_t index = 0; index < part.num_heads; ++index) {
    take_head(work, part.first_head, index);
    for (int64_t i = 0; i < tiles * kLanes; ++i) work.m[i] = -__builtin_inff(), work.d[i] = 0.0f;
    if (part.first_key < part.last_key) {
      pack_queries(args, work, part, tiles);
    } else {
      memset(work.out, 0, static_cast<size_t>(tiles * kLanes * work.width * 4));
    }
  }

  // Heads inside keys: the heads of a token lie side by side in most caches, in the same page of memory.
  for (int64_t key = part.first_key; key < part.last_key; key += work.step_keys) {
    const bool first = key == part.first_key;
    const int64_t count = part.last_key - key < work.step_keys ? part.last_key - key : work.step_keys;
    for (int64_t index = 0; index < part.num_heads; ++index) {
      take_head(work, part.first_head, index);
      bool masked[kKeyTile / kLanes], any_masked = false;
      const int64_t padded = find_keys(args, work, keys, part, key, count, masked);
      for (int64_t i = 0; i < padded / kLanes; ++i) any_masked |= masked[i];
      const bool last_head = index + 1 == part.num_heads;
      look_ahead(args, work, keys, part, last_head ? part.first_head : work.head + 1, last_head ? key + work.step_keys : key);
      score_keys(work, tiles, padded);
      for (int64_t tile = 0; tile < tiles; ++tile)
        soften(args, work, tile, tiles, rows_of_lanes + tile * kLanes, padded, masked, any_masked, first);
      add_values(work, tiles, padded, first);
    }
  }

  float* rows = work.scores;  // free again: [16][width]
  for (int64_t index = 0; index < part.num_heads; ++index) {
    take_head(work, part.first_head, index);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t count = part.num_rows - tile * kLanes < kLanes ? part.num_rows - tile * kLanes : kLanes;
      float* out = work.out + tile * kLanes * work.width;
      if (!(work.bf16 && kHasAmx)) {
        unpack_lanes(rows, work.width, out, work.width, count);
        out = rows;
      }
      for (int64_t lane = 0; lane < count; ++lane) put_row(args, part, work, tile * kLanes + lane, out + lane * work.width);
    }
  }
}

static void attention_merge(const AttentionArgs& args, const AttentionPart& part, int64_t count) {
  for (int64_t head = 0; head < part.num_heads; ++head)
    for (int64_t index = 0; index < part.num_rows; ++index) {
      const int64_t at = head * kRowTile + index;
      float* values = part.partial_out + at * args.head_dim;
      float m = part.partial_state[at * 2], d = part.partial_state[at * 2 + 1];
      for (int64_t i = 1; i < count; ++i) {
        const int64_t other = i * part.num_heads * kRowTile + at;
        const float m2 = part.partial_state[other * 2], d2 = part.partial_state[other * 2 + 1];
        const float highest = m > m2 ? m : m2, first = weight_of(m, highest), second = weight_of(m2, highest);
        const float* more = part.partial_out + other * args.head_dim;
        for (int64_t i = 0; i < args.head_dim; ++i) values[i] = values[i] * first + more[i] * second;
        m = highest, d = d * first + d2 * second;
      }
      finish_row(args, part.request, part.first_head + head, part.first_row + index, m, d, values);
    }
}

}  // namespace
}  // namespace carryover_kernels
