// One part of block_attention: 64 query rows of one (request, KV head) against a range of the request's keys.
// Scores are kept transposed, [row tile][key][16 rows]: a key from the cache is the broadcast (or AMX A) operand and is read where it
// lies, and the softmax goes down columns. Nothing is gathered but keys that lie apart in memory, 16 at a time, for AMX.
#pragma once

#include <cmath>

#include "amx.h"
#include "attention_keys.h"
#include "tile.h"

namespace carryover_kernels {
namespace {

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
  const bool empty = d == 0.0f;  // not by m, which a row of NaN scores leaves at -inf: its d is NaN, and so is its result
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
