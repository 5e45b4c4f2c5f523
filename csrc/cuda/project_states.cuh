// project_states in three launches: fc's product; the mark and the RMS norm of each row; and for one head of K or V of one layer a block's
// product of all its rows with bias, k_norm, RoPE and the scatter to pages and carry slots behind it.
#pragma once

#include "../common/rms_norm.h"
#include "../common/rope.h"
#include "product.cuh"

namespace carryover_kernels {

constexpr int kLayersALaunch = 24;  // a kernel's parameters have 4 KB

struct CacheOfLayer {
  void *k, *v;
  int64_t k_page, k_slot, k_head, v_page, v_slot, v_head;
};

struct ProjectStatesParams {
  const void *states, *fc_weight, *kv_weight;
  const float *kv_bias, *k_norm_weight, *mark, *mark_kv, *rope_table, *k_scale, *v_scale;
  const int64_t *row_cache_slot, *row_carry_slot, *row_position;
  void *carry_k, *carry_v;
  int64_t stride_states, ck_layer, ck_slot, ck_row, ck_head, cv_layer, cv_slot, cv_row, cv_head;
  int64_t rows, features, hidden, kv_heads, head_dim, rotary_dim, cache_slots, page_size, carry_slots, carry_capacity, max_position;
  float norm_eps, k_norm_eps;
  bool neox, share_kv, v_norm, parity;
  Elem cache_type, carry_type;
  float* fused;   // [rows, hidden] of fc, before the mark; null without fc
  void* normed;   // [rows, hidden] in the states' type
  int64_t first_layer, layers;  // of this launch
  CacheOfLayer cache[kLayersALaunch];
};

template <class T, int kRows>
CK_KERNEL void CK_BOUNDS(kProductThreads, 4) project_fc_kernel(ProjectStatesParams p) {
  char* shared = &shared_memory<char>();
  float* tile = reinterpret_cast<float*>(shared + kProductBytes<kRows>);
  const int64_t column_tiles = (p.hidden + kColumnsAChunk - 1) / kColumnsAChunk;
  const int64_t first_column = blockIdx.x % column_tiles * kColumnsAChunk, first_row = blockIdx.x / column_tiles * kRows;
  Factors<T> f{static_cast<const T*>(p.states) + first_row * p.stride_states, static_cast<const T*>(p.fc_weight) + first_column * p.features,
               p.stride_states, p.rows - first_row, p.hidden - first_column, p.features};
  if (f.columns > kColumnsAChunk) f.columns = kColumnsAChunk;
  product<T, kRows>(f, shared, tile, kColumnsAChunk);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumnsAChunk; i += kProductThreads) {
    const int row = i / kColumnsAChunk, column = i % kColumnsAChunk;
    if (row < f.rows && column < f.columns) p.fused[(first_row + row) * p.hidden + first_column + column] = tile[i];
  }
}

// Block `row`: normed = (x + mark) / rms.
template <class T>
CK_KERNEL void CK_BOUNDS(kProductThreads, 4) project_norm_kernel(ProjectStatesParams p) {
  float* sums = &shared_memory<float>();
  const int64_t row = blockIdx.x;
  const bool marked = p.mark && p.row_carry_slot[row] >= 0;
  const auto load = [&](float (&x)[8], int64_t first) {
    if (p.fused) load_chunk(x, p.fused + row * p.hidden, first, p.hidden, 0.0f);
    else load_chunk(x, static_cast<const T*>(p.states) + row * p.stride_states, first, p.hidden, 0.0f);
    if (!marked) return;
    float mark[8];
    load_chunk(mark, p.mark, first, p.hidden, 0.0f);
    CK_UNROLL
    for (int j = 0; j < 8; ++j) x[j] += mark[j];
  };
  float squares = 0.0f;
  for (int64_t first = threadIdx.x * 8; first < p.hidden; first += kProductThreads * 8) {
    float x[8];
    load(x, first);
    squares += ((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])) + ((x[4] * x[4] + x[5] * x[5]) + (x[6] * x[6] + x[7] * x[7]));
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  const float scale = rms_scale((sums[0] + sums[1]) + (sums[2] + sums[3]), p.hidden, p.norm_eps);
  for (int64_t first = threadIdx.x * 8; first < p.hidden; first += kProductThreads * 8) {
    float x[8];
    load(x, first);
    CK_UNROLL
    for (int j = 0; j < 8; ++j) x[j] *= scale;
    store_chunk(static_cast<T*>(p.normed) + row * p.hidden, first, p.hidden, x);
  }
}

// A warp writes one row's head to its page and its carry slot.
CK_DEVICE void scatter(const ProjectStatesParams& p, int64_t layer, int64_t head, bool is_v, int64_t row, const float* values, int lane) {
  const int64_t cache_slot = p.row_cache_slot[row], carry_slot = p.row_carry_slot[row];
  const CacheOfLayer& cache = p.cache[layer - p.first_layer];
  const float* scales = is_v ? p.v_scale : p.k_scale;
  const float scale = scales ? scales[layer] : 1.0f;
  for (int64_t first = lane * 8; first < p.head_dim; first += 256) {
    float x[8], scaled[8];
    CK_UNROLL
    for (int j = 0; j < 8; ++j) {
      x[j] = first + j < p.head_dim ? values[first + j] : 0.0f;
      scaled[j] = scales ? x[j] / scale : x[j];
    }
    if (cache_slot >= 0 && cache_slot < p.cache_slots) {
      const int64_t page = cache_slot / p.page_size, slot = cache_slot % p.page_size;
      const int64_t at = is_v ? page * cache.v_page + slot * cache.v_slot + head * cache.v_head
                              : page * cache.k_page + slot * cache.k_slot + head * cache.k_head;
      store_chunk(element_at(is_v ? cache.v : cache.k, p.cache_type, at), p.cache_type, first, p.head_dim, scaled);
    }
    if (p.carry_k && carry_slot >= 0 && carry_slot < p.carry_slots) {
      const int64_t slot = carry_slot / p.carry_capacity, place = carry_slot % p.carry_capacity;
      const int64_t at = is_v ? layer * p.cv_layer + slot * p.cv_slot + place * p.cv_row + head * p.cv_head
                              : layer * p.ck_layer + slot * p.ck_slot + place * p.ck_row + head * p.ck_head;
      store_chunk(element_at(is_v ? p.carry_v : p.carry_k, p.carry_type, at), p.carry_type, first, p.head_dim, x);
    }
  }
}

// Grid: row tiles * layers * sources * heads. Rows that are stored nowhere are multiplied for nothing, but touch no other row.
template <class T, int kRows>
CK_KERNEL void CK_BOUNDS(kProductThreads, 4) project_kv_kernel(ProjectStatesParams p) {
  char* shared = &shared_memory<char>();
  float* tile = reinterpret_cast<float*>(shared + kProductBytes<kRows>);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t sources = p.share_kv ? 1 : 2, units = p.layers * sources * p.kv_heads, unit = blockIdx.x % units;
  const int64_t first_row = blockIdx.x / units * kRows, head = unit % p.kv_heads, layer = p.first_layer + unit / (p.kv_heads * sources);
  const bool is_v = unit / p.kv_heads % sources == 1;
  const int64_t dim = p.head_dim, pitch = (dim + kColumnsAChunk - 1) / kColumnsAChunk * kColumnsAChunk;
  const int64_t first_column = (p.first_layer * sources * p.kv_heads + unit) * dim;
  const Factors<T> f{static_cast<const T*>(p.normed) + first_row * p.hidden, static_cast<const T*>(p.kv_weight) + first_column * p.hidden,
                     p.hidden, p.rows - first_row, dim, p.hidden};
  product<T, kRows>(f, shared, tile, pitch);

  const auto round = [&](float x) { return p.parity ? value_of(nearest(x, T{})) : x; };
  for (int m = warp; m < kRows && m < f.rows; m += kProductThreads / 32) {
    const int64_t row = first_row + m, position = p.row_position[row], carry_slot = p.row_carry_slot[row];
    if (position < 0 || position >= p.max_position) continue;  // a warp as a whole
    float* x = tile + m * pitch;
    const bool marked = p.mark_kv && carry_slot >= 0;
    float v_squares = 0.0f, k_squares = 0.0f;
    for (int64_t d = lane; d < dim; d += 32) {
      float value = x[d];
      if (p.kv_bias) value += p.kv_bias[first_column + d];
      if (marked) value += p.mark_kv[first_column + d];
      x[d] = value;
      v_squares += value * value;
      k_squares += round(value) * round(value);
    }
    if (is_v || p.share_kv) {
      // Out of place where K follows: the head's other copy lies in the stages, which nobody loads any more.
      float* v = p.share_kv ? reinterpret_cast<float*>(shared) + warp * pitch : x;
      const float scale = p.v_norm ? rms_scale(warp_sum(v_squares), dim, p.k_norm_eps) : 1.0f;
      for (int64_t d = lane; d < dim; d += 32) v[d] = p.v_norm ? x[d] * scale : x[d];
      __syncwarp();
      scatter(p, layer, head, true, row, v, lane);
      __syncwarp();
    }
    if (is_v) continue;
    if (p.k_norm_weight) {
      const float scale = rms_scale(warp_sum(k_squares), dim, p.k_norm_eps);
      for (int64_t d = lane; d < dim; d += 32) x[d] = round(round(round(x[d]) * scale) * round(p.k_norm_weight[layer * dim + d]));
    }
    __syncwarp();
    const int half = static_cast<int>(p.rotary_dim / 2);
    const float* table = p.rope_table + position * p.rotary_dim;
    for (int j = lane; j < half; j += 32) {
      const RopePair pair = rope_pair(j, half, p.neox);
      const Rotated turned = rope_rotate_rounded(x[pair.first], x[pair.second], round(table[j]), round(table[half + j]), round);
      x[pair.first] = turned.first;
      x[pair.second] = turned.second;
    }
    __syncwarp();
    scatter(p, layer, head, false, row, x, lane);
  }
}

}  // namespace carryover_kernels
