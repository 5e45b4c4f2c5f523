// Rows of a matrix times one vector: what a low-rank head does to the whole vocabulary. Bound by memory once enough sums are in flight.
#pragma once

#include "convert.h"
#include "vector.h"

namespace carryover_kernels {
namespace {

// 16 elements of a row as floats.
template <Elem type>
[[gnu::always_inline]] static inline VecF load_row(const char* at) {
  if constexpr (type == Elem::f32) return load(reinterpret_cast<const float*>(at));
  float x[kLanes];
  to_floats(x, at, type, kLanes);
  return load(x);
}

#if defined(__AVX512F__)
template <>
inline VecF load_row<Elem::bf16>(const char* at) {
  VecF v;
  v.p[0] = (NativeF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16);
  return v;
}
#elif defined(__AVX2__)
template <>
inline VecF load_row<Elem::bf16>(const char* at) {
  VecF v;
  for (int i = 0; i < 2; ++i)
    v.p[i] = (NativeF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + i)), 16);
  return v;
}
#endif

// Added as a tree: four additions in a row lose less than sixteen.
static inline float tree_sum(VecF v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 high = _mm512_castps512_ps256(_mm512_shuffle_f32x4((__m512)v.p[0], (__m512)v.p[0], 0xee));
  const __m256 eight = _mm512_castps512_ps256((__m512)v.p[0]) + high;
#else
  const __m256 eight = (__m256)(v.p[0] + v.p[1]);
#endif
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#else
  float sums[kLanes];
  store(sums, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return sums[0];
#endif
}

// Several rows at once: one alone would wait for its own additions. Each row's sum is the same whichever group it falls into.
template <Elem type, int kRows>
static inline void dot_group(const char* rows, int64_t columns, const float* x, float* out) {
  const int64_t size = elem_size(type), row_bytes = columns * size;
  VecF sums[kRows];
  for (int row = 0; row < kRows; ++row) sums[row] = splat(0.0f);
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
    const VecF here = load(x + k);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) sums[row] = mul_add(load_row<type>(rows + row * row_bytes + k * size), here, sums[row]);
  }
  if (k < columns) {
    float left[kLanes] = {}, other[kLanes] = {};
    memcpy(other, x + k, static_cast<size_t>(columns - k) * 4);
    for (int row = 0; row < kRows; ++row) {
      to_floats(left, rows + row * row_bytes + k * size, type, columns - k);
      sums[row] = mul_add(load(left), load(other), sums[row]);
    }
  }
  for (int row = 0; row < kRows; ++row) out[row] = tree_sum(sums[row]);
}

template <Elem type>
static void dot_all(const char* rows, int64_t count, int64_t columns, const float* x, float* out) {
  const int64_t row_bytes = columns * elem_size(type);
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) {
    const char* at = rows + row * row_bytes;
    // Two groups ahead, also past the end: rows read side by side hide the stream from the hardware's own prefetch.
    for (int64_t byte = 0; byte < 4 * row_bytes; byte += 64) __builtin_prefetch(at + 8 * row_bytes + byte);
    dot_group<type, 4>(at, columns, x, out + row);
  }
  for (; row < count; ++row) dot_group<type, 1>(rows + row * row_bytes, columns, x, out + row);
}

static void dot_rows(const void* rows, Elem type, int64_t count, int64_t columns, const float* x, float* out) {
  const char* at = static_cast<const char*>(rows);
  switch (type) {
    case Elem::f32: return dot_all<Elem::f32>(at, count, columns, x, out);
    case Elem::bf16: return dot_all<Elem::bf16>(at, count, columns, x, out);
    default: return dot_all<Elem::f16>(at, count, columns, x, out);
  }
}

}  // namespace
}  // namespace carryover_kernels
