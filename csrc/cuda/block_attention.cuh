// block_attention: a block of four warps owns 64 of the B * group query rows that share a KV head, one split of the committed keys and up to
// kColumns of V's columns; the last split also takes the carried and the block's keys. Keys come in tiles, the next one under way by cp.async
// while this one is multiplied. Scores and outputs lie in registers as mma.sync leaves them; where a type has no product on tensor cores
// (float32, or keys that q's type cannot hold), the same fragments are multiplied in float32.
#pragma once

#include "../common/online_softmax.h"
#include "../common/segments.h"
#include "elem.cuh"

namespace carryover_kernels {

constexpr int kAttentionThreads = 128, kQueryRows = 64, kKeyRing = 4;

template <class T>
constexpr int kTileKeys = sizeof(T) == 2 ? 32 : 16;

struct Segment {  // [.., rows, heads, D] of K and of V
  const void *k, *v;
  int64_t k_outer, k_row, k_head, v_outer, v_row, v_head;
  Elem type;
};

struct BlockAttentionParams {
  void* out;
  float *lse, *partial, *state;  // partial [R, B, Hq, splits, D] and state [R, B, Hq, splits, 2] where there are several splits
  const void* q;
  Segment cache, carry, block;
  const int32_t *block_table, *seq_lens, *carry_lens, *carry_slot_ids;
  const int64_t *block_start, *carry_positions;
  const float *sinks, *k_scale, *v_scale;
  int64_t q_request, q_row, q_head, stride_table;
  int64_t requests, rows, key_rows, q_heads, kv_heads, head_dim, pages, page_size, table_width, carry_slots, carry_capacity;
  int64_t window_left, window_right, row_tiles, splits, parts;
  float scale_log2, softcap_log2;  // softcap 0: off
  bool causal;
  Elem type;  // of q and out
};

struct KeyOfTile {
  const void *k, *v;  // null: nobody in this block sees it, and it is not read
  RowRange seen;      // by which block rows
};

// What of a request a block works on.
struct Share {
  int64_t r, kv_head, first_row, split, first_column;
  int64_t committed, start, slot, carried;
  int64_t first_tile, committed_tiles, carried_tiles, tiles;  // committed tiles start at first_tile; then carried ones, then the block's
  int group, first_b, last_b;                                 // block rows of the query rows
};

template <int kKeys, int kColumns>
CK_DEVICE Share share_of(const BlockAttentionParams& p) {
  Share s{};
  int64_t unit = blockIdx.x;
  s.first_column = unit % p.parts * kColumns, unit /= p.parts;
  s.split = unit % p.splits, unit /= p.splits;
  s.first_row = unit % p.row_tiles * kQueryRows, unit /= p.row_tiles;
  s.kv_head = unit % p.kv_heads, s.r = unit / p.kv_heads;
  s.group = static_cast<int>(p.q_heads / p.kv_heads);
  s.first_b = static_cast<int>(s.first_row / s.group);
  const int64_t last = (s.first_row + kQueryRows - 1) / s.group;
  s.last_b = static_cast<int>(last < p.rows ? last : p.rows - 1);
  const int64_t length = p.seq_lens[s.r];
  if (length < 0) return s;  // padding: no keys
  s.committed = clamp_length(length, p.table_width * p.page_size);
  s.start = p.block_start ? p.block_start[s.r] : length;
  // Tiles that the window of this block's earliest row has left behind are never read.
  int64_t lowest = 0;
  if (p.window_left >= 0 && s.committed + s.first_b > p.window_left) lowest = (s.committed + s.first_b - p.window_left) / kKeys;
  const int64_t all = (s.committed + kKeys - 1) / kKeys, left = all > lowest ? all - lowest : 0, each = (left + p.splits - 1) / p.splits;
  s.first_tile = lowest + s.split * each;
  s.committed_tiles = s.first_tile >= all ? 0 : all - s.first_tile < each ? all - s.first_tile : each;
  s.tiles = s.committed_tiles;
  if (s.split + 1 < p.splits) return s;
  if (p.carry.k) {
    s.slot = p.carry_slot_ids[s.r];
    if (s.slot >= 0 && s.slot < p.carry_slots) s.carried = clamp_length(p.carry_lens[s.slot], p.carry_capacity);
  }
  s.carried_tiles = (s.carried + kKeys - 1) / kKeys;
  s.tiles += s.carried_tiles + (p.key_rows + kKeys - 1) / kKeys;
  return s;
}

enum class Where { committed, carried, block };

struct TileOfShare {
  Where where;
  int64_t first;  // key of the segment
};

template <int kKeys>
CK_DEVICE TileOfShare tile_of(const Share& s, int64_t tile) {
  if (tile < s.committed_tiles) return {Where::committed, (s.first_tile + tile) * kKeys};
  tile -= s.committed_tiles;
  if (tile < s.carried_tiles) return {Where::carried, tile * kKeys};
  return {Where::block, (tile - s.carried_tiles) * kKeys};
}

CK_DEVICE const Segment& segment_of(const BlockAttentionParams& p, Where where) {
  return where == Where::committed ? p.cache : where == Where::carried ? p.carry : p.block;
}

CK_DEVICE KeyOfTile key_of(const BlockAttentionParams& p, const Share& s, TileOfShare tile, int n) {
  const int64_t index = tile.first + n;
  int64_t outer = s.r, row = index, position = index;  // relative to block row 0
  bool there = false;
  if (tile.where == Where::committed) {
    if (index < s.committed) {
      outer = p.block_table[s.r * p.stride_table + index / p.page_size];
      row = index % p.page_size;
      position = index - s.committed;
      there = outer >= 0 && outer < p.pages;
    }
  } else if (tile.where == Where::carried) {
    there = index < s.carried;
    outer = s.slot;
    if (there && p.carry_positions) position = p.carry_positions[s.slot * p.carry_capacity + index] - s.start;
  } else {
    there = index < p.key_rows;
  }
  KeyOfTile key{nullptr, nullptr, {1, 0}};
  if (!there) return key;
  key.seen = rows_seeing(position, p.rows, p.causal, p.window_left, p.window_right);
  if (key.seen.last < s.first_b || key.seen.first > s.last_b) {
    key.seen = {1, 0};
    return key;
  }
  const Segment& from = segment_of(p, tile.where);
  key.k = element_at(from.k, from.type, outer * from.k_outer + row * from.k_row + s.kv_head * from.k_head);
  key.v = element_at(from.v, from.type, outer * from.v_outer + row * from.v_row + s.kv_head * from.v_head);
  return key;
}

CK_DEVICE Elem elem_of_type(float) { return Elem::f32; }
CK_DEVICE Elem elem_of_type(BFloat16) { return Elem::bf16; }
CK_DEVICE Elem elem_of_type(Float16) { return Elem::f16; }

// Elements first .. first + 7 of a row as T, to shared memory: zeros past `count` and where there is no row.
template <class T>
CK_DEVICE void stage_eight(T* to, const void* row, Elem type, int64_t first, int64_t count) {
  constexpr int kElements = 16 / sizeof(T);
  const T* same = static_cast<const T*>(row) + first;
  if (row && type == elem_of_type(T{}) && aligned(same) && first + 8 <= count) {
    CK_UNROLL
    for (int i = 0; i < 8; i += kElements) copy_async(to + i, same + i, 16);
    return;
  }
  float x[8] = {};
  if (row) load_chunk(x, row, type, first, count, 0.0f);
  store_chunk(to, 0, 8, x);
}

template <class T, int kColumns>
struct AttentionLayout {  // of the dynamic shared memory, in bytes
  int64_t dims, k_pitch, v_pitch, q_bytes, stage_bytes, keys_at, bytes;

  CK_METHOD explicit AttentionLayout(int64_t head_dim) {
    constexpr int64_t kBytes = sizeof(T);
    dims = (head_dim + 15) / 16 * 16;
    k_pitch = dims * kBytes + 16, v_pitch = kColumns * kBytes + 16;  // rows of one of ldmatrix's matrices fall into different banks
    q_bytes = kBytes == 2 ? kQueryRows * k_pitch : 4 * 16 * (kTileKeys<T> + 1) * 4;  // float32: the warps' weights instead of q
    q_bytes = (q_bytes + 15) / 16 * 16;
    stage_bytes = kTileKeys<T> * (k_pitch + v_pitch);
    keys_at = q_bytes + 2 * stage_bytes;
    bytes = keys_at + kKeyRing * kTileKeys<T> * static_cast<int64_t>(sizeof(KeyOfTile));
  }
};

// Products of one warp's 16 query rows, in the fragments of mma.m16n8k16: element i of fragment j is row lane / 4 + 8 * (i / 2), column
// 8 * j + 2 * (lane % 4) + i % 2.
template <class T, int kColumns>
struct Products {
  static constexpr int kKeys = kTileKeys<T>;
  const char* q;  // this warp's rows
  int64_t dims, k_pitch, v_pitch;

  CK_METHOD Products(const BlockAttentionParams& p, const Share& s, char* shared, const AttentionLayout<T, kColumns>& layout, int warp, int)
      : q(shared + warp * 16 * layout.k_pitch), dims(layout.dims), k_pitch(layout.k_pitch), v_pitch(layout.v_pitch) {
    for (int64_t i = threadIdx.x; i < kQueryRows * (dims / 8); i += kAttentionThreads) {
      const int64_t row = i / (dims / 8), first = i % (dims / 8) * 8, b = (s.first_row + row) / s.group;
      const int64_t head = s.kv_head * s.group + (s.first_row + row) % s.group;
      const void* from = b < p.rows && s.tiles ? element_at(p.q, p.type, s.r * p.q_request + b * p.q_row + head * p.q_head) : nullptr;
      stage_eight(reinterpret_cast<T*>(shared + row * k_pitch) + first, from, p.type, first, p.head_dim);
    }
  }

  CK_METHOD void scores(float (&sum)[kKeys / 8][4], const char* k, int lane) const {
    for (int64_t d = 0; d < dims; d += 16) {
      uint32_t a[4];
      ldmatrix(a, q + lane % 16 * k_pitch + d * 2 + lane / 16 * 16);
      CK_UNROLL
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        ldmatrix(b, k + (n * 16 + lane / 16 * 8 + lane % 8) * k_pitch + d * 2 + lane / 8 % 2 * 16);
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
        mma(sum[2 * n], a, first, T{});
        mma(sum[2 * n + 1], a, second, T{});
      }
    }
  }

  CK_METHOD void add_values(float (&out)[kColumns / 8][4], const float (&weight)[kKeys / 8][4], const char* v, int lane) const {
    CK_UNROLL
    for (int n = 0; n < kKeys / 16; ++n) {
      const uint32_t a[4] = {pair(weight[2 * n], 0), pair(weight[2 * n], 2), pair(weight[2 * n + 1], 0), pair(weight[2 * n + 1], 2)};
      CK_UNROLL
      for (int c = 0; c < kColumns / 16; ++c) {
        uint32_t b[4];
        ldmatrix_transposed(b, v + (n * 16 + lane % 16) * v_pitch + c * 32 + lane / 16 * 16);
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
        mma(out[2 * c], a, first, T{});
        mma(out[2 * c + 1], a, second, T{});
      }
    }
  }

  CK_METHOD static uint32_t pair(const float (&x)[4], int i) {
    const T low = nearest(x[i], T{}), high = nearest(x[i + 1], T{});
    return low.bits | static_cast<uint32_t>(high.bits) << 16;
  }
};

template <int kColumns>
struct Products<float, kColumns> {
  static constexpr int kKeys = kTileKeys<float>, kWeightPitch = kKeys + 1;
  const void* q[2];  // of rows lane / 4 and lane / 4 + 8; null for a row that is not there
  Elem q_type;
  float* weights;  // this warp's, [16, kWeightPitch]
  int64_t head_dim, k_pitch, v_pitch;

  CK_METHOD Products(const BlockAttentionParams& p, const Share& s, char* shared, const AttentionLayout<float, kColumns>& layout, int warp, int lane)
      : q_type(p.type), weights(reinterpret_cast<float*>(shared) + warp * 16 * kWeightPitch), head_dim(p.head_dim), k_pitch(layout.k_pitch),
        v_pitch(layout.v_pitch) {
    CK_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int64_t row = s.first_row + warp * 16 + lane / 4 + 8 * i, b = row / s.group, head = s.kv_head * s.group + row % s.group;
      q[i] = b < p.rows && s.tiles ? element_at(p.q, p.type, s.r * p.q_request + b * p.q_row + head * p.q_head) : nullptr;
    }
  }

  CK_METHOD void scores(float (&sum)[kKeys / 8][4], const char* k, int lane) const {
    for (int64_t d = 0; d < head_dim; d += 16) {
      float part[kKeys / 8][4] = {};  // sixteen products by themselves: the error grows with D / 16
      for (int64_t e = d; e < d + 16 && e < head_dim; ++e) {
        const float x[2] = {q[0] ? load_one(q[0], q_type, e) : 0.0f, q[1] ? load_one(q[1], q_type, e) : 0.0f};
        CK_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) {
          CK_UNROLL
          for (int i = 0; i < 4; ++i)
            part[j][i] += x[i / 2] * reinterpret_cast<const float*>(k + (j * 8 + lane % 4 * 2 + i % 2) * k_pitch)[e];
        }
      }
      CK_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        CK_UNROLL
        for (int i = 0; i < 4; ++i) sum[j][i] += part[j][i];
      }
    }
  }

  CK_METHOD void add_values(float (&out)[kColumns / 8][4], const float (&weight)[kKeys / 8][4], const char* v, int lane) const {
    __syncwarp();  // the last tile's weights are read
    CK_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
      CK_UNROLL
      for (int i = 0; i < 4; ++i) weights[(lane / 4 + i / 2 * 8) * kWeightPitch + j * 8 + lane % 4 * 2 + i % 2] = weight[j][i];
    }
    __syncwarp();
    CK_UNROLL
    for (int c = 0; c < kColumns / 8; ++c) {
      float part[4] = {};
      for (int key = 0; key < kKeys; ++key) {
        const float* row = reinterpret_cast<const float*>(v + key * v_pitch) + c * 8 + lane % 4 * 2;
        const float first = weights[lane / 4 * kWeightPitch + key], second = weights[(lane / 4 + 8) * kWeightPitch + key];
        part[0] += first * row[0], part[1] += first * row[1];
        part[2] += second * row[0], part[3] += second * row[1];
      }
      CK_UNROLL
      for (int i = 0; i < 4; ++i) out[c][i] += part[i];
    }
  }
};

// Over the four lanes that share a fragment's row.
CK_DEVICE float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

CK_DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

template <class T, int kColumns>
CK_KERNEL void CK_BOUNDS(kAttentionThreads, 3) block_attention_kernel(BlockAttentionParams p) {
  constexpr int kKeys = kTileKeys<T>;
  const AttentionLayout<T, kColumns> layout(p.head_dim);
  char* shared = &shared_memory<char>();
  char* stages = shared + layout.q_bytes;
  KeyOfTile* ring = reinterpret_cast<KeyOfTile*>(shared + layout.keys_at);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const Share s = share_of<kKeys, kColumns>(p);

  const auto find_keys = [&](int64_t tile) {
    if (threadIdx.x < kKeys && tile < s.tiles)
      ring[tile % kKeyRing * kKeys + threadIdx.x] = key_of(p, s, tile_of<kKeys>(s, tile), static_cast<int>(threadIdx.x));
  };
  const auto load = [&](int64_t tile) {
    if (tile < s.tiles) {
      const KeyOfTile* keys = ring + tile % kKeyRing * kKeys;
      const Elem type = segment_of(p, tile_of<kKeys>(s, tile).where).type;
      char* to = stages + tile % 2 * layout.stage_bytes;
      const int k_pieces = static_cast<int>(layout.dims / 8), pieces = k_pieces + kColumns / 8;
      for (int i = static_cast<int>(threadIdx.x); i < kKeys * pieces; i += kAttentionThreads) {
        const int key = i / pieces, piece = i % pieces;
        if (piece < k_pieces) {
          stage_eight(reinterpret_cast<T*>(to + key * layout.k_pitch) + piece * 8, keys[key].k, type, piece * 8, p.head_dim);
        } else {
          const int64_t first = s.first_column + (piece - k_pieces) * 8;
          stage_eight(
              reinterpret_cast<T*>(to + kKeys * layout.k_pitch + key * layout.v_pitch) + (piece - k_pieces) * 8,
              first < p.head_dim ? keys[key].v : nullptr, type, first, p.head_dim);
        }
      }
    }
    copy_commit();
  };

  const Products<T, kColumns> products(p, s, shared, layout, warp, lane);
  find_keys(0);
  find_keys(1);
  __syncthreads();
  load(0);
  float out[kColumns / 8][4] = {};
  SoftmaxState state[2] = {softmax_empty(), softmax_empty()};
  int64_t b[2];
  CK_UNROLL
  for (int i = 0; i < 2; ++i) b[i] = (s.first_row + warp * 16 + lane / 4 + 8 * i) / s.group;

  for (int64_t tile = 0; tile < s.tiles; ++tile) {
    load(tile + 1);
    find_keys(tile + 2);
    copy_wait<1>();
    __syncthreads();
    const Where where = tile_of<kKeys>(s, tile).where;
    const char* k = stages + tile % 2 * layout.stage_bytes;
    const KeyOfTile* keys = ring + tile % kKeyRing * kKeys;
    float score[kKeys / 8][4] = {};
    products.scores(score, k, lane);
    const float scale = p.scale_log2 * (where == Where::committed && p.k_scale ? p.k_scale[0] : 1.0f);
    const float v_factor = where == Where::committed && p.v_scale ? p.v_scale[0] : 1.0f;
    float most[2] = {-INFINITY, -INFINITY};
    CK_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
      CK_UNROLL
      for (int i = 0; i < 4; ++i) {
        const RowRange seen = keys[j * 8 + lane % 4 * 2 + i % 2].seen;
        float x = score[j][i] * scale;
        if (p.softcap_log2 > 0.0f) x = p.softcap_log2 * tanhf(x / p.softcap_log2);
        score[j][i] = b[i / 2] >= seen.first && b[i / 2] <= seen.last ? x : -INFINITY;
        most[i / 2] = fmaxf(most[i / 2], score[j][i]);
      }
    }
    CK_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float m = fmaxf(state[i].m, row_max(most[i])), shift = softmax_shift(m), kept = exp2f(state[i].m - shift);
      float sum = 0.0f;
      CK_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        CK_UNROLL
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          score[j][e] = exp2f(score[j][e] - shift);
          sum += score[j][e];
          score[j][e] *= v_factor;
        }
      }
      state[i] = {m, state[i].d * kept + row_sum(sum)};
      CK_UNROLL
      for (int c = 0; c < kColumns / 8; ++c) out[c][2 * i] *= kept, out[c][2 * i + 1] *= kept;
    }
    products.add_values(out, score, k + kKeys * layout.k_pitch, lane);
    __syncthreads();  // everyone is done with this stage and these keys
  }
  copy_wait<0>();

  CK_UNROLL
  for (int i = 0; i < 2; ++i) {
    if (b[i] >= p.rows) continue;
    const int64_t head = s.kv_head * s.group + (s.first_row + warp * 16 + lane / 4 + 8 * i) % s.group;
    const int64_t row = (s.r * p.rows + b[i]) * p.q_heads + head;
    const bool first_lane = lane % 4 == 0 && s.first_column == 0;
    float factor = 1.0f;
    if (p.splits == 1) {
      factor = p.sinks ? softmax_add_sink(state[i], p.sinks[head] * kLog2e) : 1.0f;
      factor *= softmax_inverse(state[i]);
      if (p.lse && first_lane) p.lse[row] = softmax_lse(state[i]);
    } else if (first_lane) {
      float* to = p.state + (row * p.splits + s.split) * 2;
      to[0] = state[i].m, to[1] = state[i].d;
    }
    CK_UNROLL
    for (int c = 0; c < kColumns / 8; ++c) {
      CK_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int64_t column = s.first_column + c * 8 + lane % 4 * 2 + e;
        if (column >= p.head_dim) continue;
        const float x = out[c][2 * i + e];
        if (p.splits > 1) p.partial[(row * p.splits + s.split) * p.head_dim + column] = x;
        // 0 by selection where no key was seen: another row's NaN in V times a weight of 0 may have come in.
        else store_one(p.out, p.type, row * p.head_dim + column, state[i].d == 0.0f ? 0.0f : x * factor);
      }
    }
  }
}

// A warp merges the splits of one query row.
CK_KERNEL void CK_BOUNDS(kAttentionThreads, 4) merge_splits_kernel(BlockAttentionParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kAttentionThreads / 32) + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (row >= p.requests * p.rows * p.q_heads) return;
  const float* states = p.state + row * p.splits * 2;
  SoftmaxState state = softmax_empty();
  for (int64_t split = 0; split < p.splits; ++split) state = softmax_merge(state, {states[2 * split], states[2 * split + 1]}).state;
  const float shift = softmax_shift(state.m);
  float factor = p.sinks ? softmax_add_sink(state, p.sinks[row % p.q_heads] * kLog2e) : 1.0f;
  factor *= softmax_inverse(state);
  for (int64_t column = lane; column < p.head_dim; column += 32) {
    float sum = 0.0f;
    for (int64_t split = 0; split < p.splits; ++split)
      if (states[2 * split + 1] != 0.0f) sum += exp2f(states[2 * split] - shift) * p.partial[(row * p.splits + split) * p.head_dim + column];
    store_one(p.out, p.type, row * p.head_dim + column, state.d == 0.0f ? 0.0f : sum * factor);
  }
  if (p.lse && lane == 0) p.lse[row] = softmax_lse(state);
}

}  // namespace carryover_kernels
