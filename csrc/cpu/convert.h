// bf16, f16 and fp8 to float32 and back, one by one and by the row.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace carryover_kernels {
namespace {

// bf16 and f16 <-> f32, one at a time. NaN keeps being NaN; halves round to nearest even.
static inline float bf16_to_float(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t float_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline float f16_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7fff;
  // Scaling by 2^112 moves the exponent's bias and normalises subnormals in one product.
  uint32_t u = magnitude << 13;
  float f;
  memcpy(&f, &u, 4);
  f *= 5.192296858534828e33f;
  memcpy(&u, &f, 4);
  if (magnitude >= 0x7c00) u = 0x7f800000 | ((magnitude & 0x3ff) << 13);
  u |= sign;
  memcpy(&f, &u, 4);
  return f;
#endif
}
static inline uint16_t float_to_f16(float f) {
#if defined(__F16C__)
  return _cvtss_sh(f, 0);
#else
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint32_t sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and up round to infinity
  if (magnitude < 0x38800000) {  // subnormal: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits
    float a;
    memcpy(&a, &magnitude, 4);
    a += 0.5f;
    uint32_t b;
    memcpy(&b, &a, 4);
    return static_cast<uint16_t>(sign | (b - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
#endif
}

// fp8, by hand: every value is exact in bf16 and in f32. e4m3 ("fn"): no infinity, 0x7f is NaN, largest 448. e5m2: as f16 cut to 8 bits.
static inline float e4m3_to_float(uint8_t b) {
  const int exponent = (b >> 3) & 15, mantissa = b & 7;
  float f;
  if ((b & 0x7f) == 0x7f) {
    f = __builtin_nanf("");
  } else if (exponent == 0) {
    f = static_cast<float>(mantissa) * 0.001953125f;  // 2^-9
  } else {
    const uint32_t u = static_cast<uint32_t>(exponent + 120) << 23 | static_cast<uint32_t>(mantissa) << 20;
    memcpy(&f, &u, 4);
  }
  return b & 0x80 ? -f : f;
}
static inline float e5m2_to_float(uint8_t b) { return f16_to_float(static_cast<uint16_t>(b << 8)); }

// Saturating, nearest even. mantissa_bits 3 and bias 7, or 2 and 15; subnormals are multiples of 2^(1 - bias - mantissa_bits).
static inline uint8_t float_to_fp8(float f, int mantissa_bits, int bias, float largest, uint8_t nan) {
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | nan;
  float a;
  memcpy(&a, &u, 4);
  if (a > largest) a = largest;
  const uint32_t smallest = static_cast<uint32_t>(128 - bias) << 23;  // bits of the smallest normal, 2^(1 - bias)
  memcpy(&u, &a, 4);
  if (u < smallest) {
    // 2^(23 - mantissa_bits) times the smallest normal: its last bit is one subnormal step.
    const uint32_t big_bits = smallest + (static_cast<uint32_t>(23 - mantissa_bits) << 23);
    float big;
    memcpy(&big, &big_bits, 4);
    const float sum = a + big;
    uint32_t s;
    memcpy(&s, &sum, 4);
    return sign | static_cast<uint8_t>(s - big_bits);
  }
  const int drop = 23 - mantissa_bits;
  u += (1u << (drop - 1)) - 1 + ((u >> drop) & 1);
  u -= smallest - (1u << 23);
  u >>= drop;
  return sign | static_cast<uint8_t>(u);
}
static inline uint8_t float_to_e4m3(float f) { return float_to_fp8(f, 3, 7, 448.0f, 0x7f); }
static inline uint8_t float_to_e5m2(float f) { return float_to_fp8(f, 2, 15, 57344.0f, 0x7f); }

static inline void to_floats(float* to, const void* from, Elem type, int64_t n) {
  int64_t i = 0;
  switch (type) {
    case Elem::f32: memcpy(to, from, static_cast<size_t>(n) * 4); return;
    case Elem::bf16: {
      const uint16_t* x = static_cast<const uint16_t*>(from);
#if defined(__AVX2__)
      for (; i + 16 <= n; i += 16) {
        const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
        const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i + 8)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_slli_epi32(low, 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 8), _mm256_slli_epi32(high, 16));
      }
#endif
      for (; i < n; ++i) to[i] = bf16_to_float(x[i]);
      return;
    }
    case Elem::f16: {
      const uint16_t* x = static_cast<const uint16_t*>(from);
#if defined(__AVX512F__)
      for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i))));
#elif defined(__F16C__)
      for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
      for (; i < n; ++i) to[i] = f16_to_float(x[i]);
      return;
    }
    case Elem::e4m3:
    case Elem::e5m2: {
      const uint8_t* x = static_cast<const uint8_t*>(from);
      for (; i < n; ++i) to[i] = type == Elem::e4m3 ? e4m3_to_float(x[i]) : e5m2_to_float(x[i]);
      return;
    }
  }
}

static inline void from_floats(void* to, Elem type, const float* from, int64_t n) {
  int64_t i = 0;
  switch (type) {
    case Elem::f32: memcpy(to, from, static_cast<size_t>(n) * 4); return;
    case Elem::bf16: {
      uint16_t* y = static_cast<uint16_t*>(to);
#if defined(__AVX512BF16__)
      for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#endif
      for (; i < n; ++i) y[i] = float_to_bf16(from[i]);
      return;
    }
    case Elem::f16: {
      uint16_t* y = static_cast<uint16_t*>(to);
#if defined(__AVX512F__)
      for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#endif
      for (; i < n; ++i) y[i] = float_to_f16(from[i]);
      return;
    }
    case Elem::e4m3:
    case Elem::e5m2: {
      uint8_t* y = static_cast<uint8_t*>(to);
      for (; i < n; ++i) y[i] = type == Elem::e4m3 ? float_to_e4m3(from[i]) : float_to_e5m2(from[i]);
      return;
    }
  }
}

// fp8 as bf16, exactly.
static inline void fp8_to_bf16(uint16_t* to, const uint8_t* from, Elem type, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float f = type == Elem::e4m3 ? e4m3_to_float(from[i]) : e5m2_to_float(from[i]);
    uint32_t u;
    memcpy(&u, &f, 4);
    to[i] = static_cast<uint16_t>(u >> 16);
  }
}

}  // namespace
}  // namespace carryover_kernels
