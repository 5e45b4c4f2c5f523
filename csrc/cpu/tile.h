// Transposes and small products of vectors.
//
// "Lane-packed": a matrix X[k][row] is kept as [row tile of 16][k][16], so that a row of an attention block (or of a batch) is a
// lane, and maxima, sums, norms and rotations go down columns without one horizontal step. Two bf16 of neighbouring k share a lane's
// 32 bits, as vdpbf16ps and the AMX tiles want them.
#pragma once

#include "convert.h"
#include "vector.h"

namespace carryover_kernels {
namespace {

// 16 x 16 transpose of 32-bit elements, in registers where there are 32 of them.
#if defined(__AVX512F__)
static inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#endif

// to[c * to_step + r] = from[r][c] for 16 rows and `columns` 32-bit columns. A null row gives zeros.
static inline void pack_lanes(uint32_t* to, int64_t to_step, const uint32_t* const from[16], int64_t columns) {
  int64_t c = 0;
#if defined(__AVX512F__)
  for (; c < columns; c += 16) {
    const int64_t left = columns - c;
    const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = from[i] ? _mm512_maskz_loadu_epi32(mask, from[i] + c) : _mm512_setzero_si512();
    transpose16(r);
    for (int i = 0; i < 16; ++i)
      if (i < left) _mm512_storeu_si512(to + (c + i) * to_step, r[i]);
  }
#else
  for (; c < columns; ++c)
    for (int i = 0; i < 16; ++i) {
      uint32_t x = 0;
      if (from[i]) memcpy(&x, from[i] + c, 4);
      to[c * to_step + i] = x;
    }
#endif
}

// to[r][c] = from[c * 16 + r]: the way back, for `columns` columns.
static inline void unpack_lanes(float* to, int64_t to_row, const float* from, int64_t columns, int64_t rows) {
  int64_t c = 0;
#if defined(__AVX512F__)
  for (; c + 16 <= columns; c += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + (c + i) * 16);
    transpose16(r);
    for (int i = 0; i < 16; ++i)
      if (i < rows) _mm512_storeu_si512(to + i * to_row + c, r[i]);
  }
#endif
  for (; c < columns; ++c)
    for (int64_t i = 0; i < rows; ++i) to[i * to_row + c] = from[c * 16 + i];
}

// Sum of squares of floats that lie side by side: 16 chains, whose ends and the rest are added in double.
static inline float sum_of_squares(const float* x, int64_t count) {
  VecF squares = splat(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) squares = mul_add(load(x + i), load(x + i), squares);
  float lanes[kLanes];
  store(lanes, squares);
  double sum = 0.0;
  for (float lane : lanes) sum += lane;
  for (; i < count; ++i) sum += static_cast<double>(x[i]) * x[i];
  return static_cast<float>(sum);
}

// acc[u][v] += sum over k of W(u, k) * X[tile v][k][16]: W's elements are broadcast, X's come as whole vectors.
// kDot: an element of W and a lane of X is a pair of bf16.
template <int U, int V, bool kDot, class W>
static inline void multiply(VecF (&acc)[U][V], W w, const float* x, int64_t tile_stride, int64_t first, int64_t last) {
  for (int64_t k = first; k < last; ++k) {
    VecF xv[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) xv[v] = load(x + v * tile_stride + k * kLanes);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      if constexpr (kDot) {
#if defined(__AVX512BF16__)
        uint32_t pair;
        memcpy(&pair, w(u, k), 4);
        const __m512bh b = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          acc[u][v].p[0] = (NativeF)_mm512_dpbf16_ps((__m512)acc[u][v].p[0], (__m512bh)xv[v].p[0], b);
#endif
      } else {
        float element;
        memcpy(&element, w(u, k), 4);
        const VecF b = splat(element);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[u][v] = mul_add(xv[v], b, acc[u][v]);
      }
    }
  }
}

// Products summed in one chain: longer sums are made of such pieces, whose rounding errors do not pile up over thousands of k.
constexpr int64_t kChain = 64;

// C[tile][row u][16] (+)= W X, for U rows of C from row `row` and V tiles; `start`: C holds a sum already.
template <int U, int V, bool kDot, class W>
static inline void product_block(
    float* c, int64_t c_tile, int64_t row, W w, const float* x, int64_t x_tile, int64_t first, int64_t last, bool start) {
  do {
    const int64_t stop = last - first < kChain ? last : first + kChain;
    VecF acc[U][V];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[u][v] = splat(0.0f);
    multiply<U, V, kDot>(acc, w, x, x_tile, first, stop);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* at = c + v * c_tile + (row + u) * kLanes;
        store(at, start ? load(at) + acc[u][v] : acc[u][v]);
      }
    start = true, first = stop;
  } while (first < last);
}

template <int U, int V, bool kDot, class W>
static inline void product_tail(
    int64_t rows, float* c, int64_t c_tile, int64_t row, W w, const float* x, int64_t x_tile, int64_t first, int64_t last, bool start) {
  if (rows == U) {
    product_block<U, V, kDot>(c, c_tile, row, w, x, x_tile, first, last, start);
  } else if constexpr (U > 1) {
    product_tail<U - 1, V, kDot>(rows, c, c_tile, row, w, x, x_tile, first, last, start);
  }
}

// C[tile][0..rows)[16] (+)= W X with W(row, k) a pointer to element (row, k).
template <int V, bool kDot, class W>
static void product_tiles(
    float* c, int64_t c_tile, int64_t rows, W w, const float* x, int64_t x_tile, int64_t first, int64_t last, bool start) {
  for (int64_t row = 0; row < rows; row += kRowUnroll) {
    const auto here = [&](int u, int64_t k) { return w(row + u, k); };
    const int64_t count = rows - row < kRowUnroll ? rows - row : kRowUnroll;
    product_tail<kRowUnroll, V, kDot>(count, c, c_tile, row, here, x, x_tile, first, last, start);
  }
}

template <int V, bool kDot, class W>
static void product_some(
    int64_t tiles, float* c, int64_t c_tile, int64_t rows, W w, const float* x, int64_t x_tile, int64_t first, int64_t last, bool start) {
  if (tiles == V) {
    product_tiles<V, kDot>(c, c_tile, rows, w, x, x_tile, first, last, start);
  } else if constexpr (V > 1) {
    product_some<V - 1, kDot>(tiles, c, c_tile, rows, w, x, x_tile, first, last, start);
  }
}

template <bool kDot, class W>
static void product(
    float* c, int64_t c_tile, int64_t tiles, int64_t rows, W w, const float* x, int64_t x_tile, int64_t first, int64_t last, bool start) {
  for (int64_t tile = 0; tile < tiles; tile += kTileUnroll) {
    const int64_t count = tiles - tile < kTileUnroll ? tiles - tile : kTileUnroll;
    product_some<kTileUnroll, kDot>(count, c + tile * c_tile, c_tile, rows, w, x + tile * x_tile, x_tile, first, last, start);
  }
}

}  // namespace
}  // namespace carryover_kernels
