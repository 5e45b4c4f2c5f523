// qk_norm_rope: a warp a head of a row, in float32 between load and store. A lane owns whole RoPE pairs, so that no value crosses lanes.
#pragma once

#include "../common/rms_norm.h"
#include "../common/rope.h"
#include "elem.cuh"

namespace carryover_kernels {

struct QkNormRopeParams {
  void *q, *k, *v;
  const void* qkv;
  const float *rope_table, *q_norm_weight, *k_norm_weight;
  const int64_t* positions;
  int64_t stride_qkv;
  int64_t rows, max_position;
  int q_heads, kv_heads, head_dim, rotary_dim;
  float eps;
  bool neox, share_kv, v_norm, parity;
};

constexpr int kHeadsABlock = 4;

template <class T>
CK_KERNEL void CK_BOUNDS(32 * kHeadsABlock, 1) qk_norm_rope_kernel(QkNormRopeParams p) {
  const int64_t heads = p.q_heads + 2 * p.kv_heads, unit = static_cast<int64_t>(blockIdx.x) * kHeadsABlock + threadIdx.x / 32;
  if (unit >= p.rows * heads) return;  // a warp as a whole
  const int64_t row = unit / heads;
  const int head = static_cast<int>(unit % heads), lane = static_cast<int>(threadIdx.x % 32), dim = p.head_dim;
  const bool is_q = head < p.q_heads, is_v = head >= p.q_heads + p.kv_heads;
  const int own = is_q ? head : is_v ? head - p.q_heads - p.kv_heads : head - p.q_heads;
  T* to = static_cast<T*>(is_q ? p.q : is_v ? p.v : p.k) + (row * (is_q ? p.q_heads : p.kv_heads) + own) * dim;

  const int64_t position = p.positions[row];
  if (position < 0 || position >= p.max_position) {
    for (int d = lane; d < dim; d += 32) to[d] = nearest(0.0f, T{});
    return;
  }
  const T* from = static_cast<const T*>(p.qkv) + row * p.stride_qkv + static_cast<int64_t>(is_v && p.share_kv ? p.q_heads + own : head) * dim;
  if (is_v && !p.v_norm) {
    for (int d = lane; d < dim; d += 32) to[d] = from[d];
    return;
  }
  const float* weight = is_v ? nullptr : is_q ? p.q_norm_weight : p.k_norm_weight;
  float scale = 1.0f;
  if (weight || is_v) {
    float squares = 0.0f;
    for (int d = lane; d < dim; d += 32) squares += value_of(from[d]) * value_of(from[d]);
    scale = rms_scale(warp_sum(squares), dim, p.eps);
  }
  const auto round = [&](float x) { return p.parity && !is_v ? value_of(nearest(x, T{})) : x; };
  const auto normed = [&](int d) {
    const float x = value_of(from[d]);
    return weight ? round(round(x * scale) * round(weight[d])) : is_v ? x * scale : x;
  };
  const int half = is_v ? 0 : p.rotary_dim / 2;
  const float* table = p.rope_table + position * p.rotary_dim;
  for (int j = lane; j < half; j += 32) {
    const RopePair pair = rope_pair(j, half, p.neox);
    const Rotated turned = rope_rotate_rounded(normed(pair.first), normed(pair.second), round(table[j]), round(table[half + j]), round);
    to[pair.first] = nearest(turned.first, T{});
    to[pair.second] = nearest(turned.second, T{});
  }
  for (int d = 2 * half + lane; d < dim; d += 32) to[d] = nearest(normed(d), T{});
}

}  // namespace carryover_kernels
