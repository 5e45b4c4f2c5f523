// qk_norm_rope: one head at a time, in float32 between load and store.
#pragma once

#include "../common/rms_norm.h"
#include "../common/rope.h"
#include "tile.h"

namespace carryover_kernels {
namespace {

template <class Round>
static inline void norm_and_rotate(const QkNormRopeArgs& args, const float* weight, const float* table, float* x, Round round) {
  const int dim = static_cast<int>(args.head_dim), half = static_cast<int>(args.rotary_dim / 2);
  if (weight) {
    const float scale = rms_scale(sum_of_squares(x, dim), dim, args.eps);
    for (int d = 0; d < dim; ++d) x[d] = round(round(x[d] * scale) * round(weight[d]));
  }
  if (args.neox) {
    for (int j = 0; j < half; ++j) {
      const Rotated r = rope_rotate_rounded(x[j], x[j + half], round(table[j]), round(table[half + j]), round);
      x[j] = r.first, x[j + half] = r.second;
    }
  } else {
    for (int j = 0; j < half; ++j) {
      const Rotated r = rope_rotate_rounded(x[2 * j], x[2 * j + 1], round(table[j]), round(table[half + j]), round);
      x[2 * j] = r.first, x[2 * j + 1] = r.second;
    }
  }
}

static void norm_and_rotate_as(const QkNormRopeArgs& args, const float* weight, const float* table, float* x) {
  if (!args.rope_parity || args.type == Elem::f32) {
    norm_and_rotate(args, weight, table, x, [](float y) { return y; });
  } else if (args.type == Elem::bf16) {
    norm_and_rotate(args, weight, table, x, [](float y) { return bf16_to_float(float_to_bf16(y)); });
  } else {
    norm_and_rotate(args, weight, table, x, [](float y) { return f16_to_float(float_to_f16(y)); });
  }
}

static void qk_norm_rope(const QkNormRopeArgs& args, int64_t first_row, int64_t last_row) {
  const int64_t dim = args.head_dim, size = elem_size(args.type), row_bytes = dim * size;
  constexpr int64_t kMostOnStack = 1024;
  float stack[kMostOnStack];
  float* x = dim <= kMostOnStack ? stack : new float[dim];
  for (int64_t row = first_row; row < last_row; ++row) {
    char* q = static_cast<char*>(args.q) + row * args.q_heads * row_bytes;
    char* k = static_cast<char*>(args.k) + row * args.kv_heads * row_bytes;
    char* v = static_cast<char*>(args.v) + row * args.kv_heads * row_bytes;
    const int64_t position = args.positions[row];
    if (position < 0 || position >= args.max_position) {
      memset(q, 0, static_cast<size_t>(args.q_heads * row_bytes));
      memset(k, 0, static_cast<size_t>(args.kv_heads * row_bytes));
      memset(v, 0, static_cast<size_t>(args.kv_heads * row_bytes));
      continue;
    }
    const char* from = static_cast<const char*>(args.qkv) + row * args.qkv_row * size;
    const float* table = args.rope_table + position * args.rotary_dim;
    for (int64_t head = 0; head < args.q_heads; ++head, from += row_bytes, q += row_bytes) {
      to_floats(x, from, args.type, dim);
      norm_and_rotate_as(args, args.q_norm_weight, table, x);
      from_floats(q, args.type, x, dim);
    }
    const char* raw_v = args.share_kv ? from : from + args.kv_heads * row_bytes;
    for (int64_t head = 0; head < args.kv_heads; ++head, from += row_bytes, k += row_bytes) {
      to_floats(x, from, args.type, dim);
      norm_and_rotate_as(args, args.k_norm_weight, table, x);
      from_floats(k, args.type, x, dim);
    }
    if (!args.v_norm) {
      memcpy(v, raw_v, static_cast<size_t>(args.kv_heads * row_bytes));
      continue;
    }
    for (int64_t head = 0; head < args.kv_heads; ++head, raw_v += row_bytes, v += row_bytes) {
      to_floats(x, raw_v, args.type, dim);
      const float scale = rms_scale(sum_of_squares(x, dim), dim, args.eps);
      for (int64_t d = 0; d < dim; ++d) x[d] *= scale;
      from_floats(v, args.type, x, dim);
    }
  }
  if (x != stack) delete[] x;
}

}  // namespace
}  // namespace carryover_kernels
