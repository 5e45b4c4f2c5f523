// Vectors of 16 floats and the small products of them, compiled once per instruction set (kernels.cpp defines which).
// Everything has internal linkage: an AVX-512 copy of an inline function must not win at link time on a machine without it.
//
// "Lane-packed": a matrix X[k][row] is kept as [row tile of 16][k][16], so that a row of an attention block (or of a batch) is a
// lane, and maxima, sums, norms and rotations go down columns without one horizontal step. Two bf16 of neighbouring k share a lane's
// 32 bits, as vdpbf16ps and the AMX tiles want them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace carryover_kernels {
namespace {

constexpr int64_t kLanes = 16;

#if defined(__AVX512F__)
constexpr int kNative = 16, kRowUnroll = 6, kTileUnroll = 4;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kNative = 8, kRowUnroll = 3, kTileUnroll = 2;  // 12 of 16
#else
constexpr int kNative = 4, kRowUnroll = 3, kTileUnroll = 1;  // 12 of 16
#endif
constexpr int kParts = 16 / kNative;

#if defined(__AVX512BF16__)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

typedef float NativeF __attribute__((vector_size(kNative * 4)));
typedef int32_t NativeI __attribute__((vector_size(kNative * 4)));
typedef float NativeFU __attribute__((vector_size(kNative * 4), aligned(4)));
typedef int32_t NativeIU __attribute__((vector_size(kNative * 4), aligned(4)));

struct VecF {
  NativeF p[kParts];
};
struct VecI {
  NativeI p[kParts];
};

#define CK_EACH for (int i = 0; i < kParts; ++i)

static inline VecF load(const float* from) {
  VecF v;
  CK_EACH v.p[i] = *reinterpret_cast<const NativeFU*>(from + i * kNative);
  return v;
}
static inline void store(float* to, VecF v) { CK_EACH *reinterpret_cast<NativeFU*>(to + i * kNative) = v.p[i]; }
static inline VecI load_int(const int32_t* from) {
  VecI v;
  CK_EACH v.p[i] = *reinterpret_cast<const NativeIU*>(from + i * kNative);
  return v;
}
static inline void store_int(int32_t* to, VecI v) { CK_EACH *reinterpret_cast<NativeIU*>(to + i * kNative) = v.p[i]; }
static inline VecF splat(float x) {
  VecF v;
  CK_EACH v.p[i] = x - NativeF{};  // x - 0 is x and folds to a broadcast; 0 + x would not, for the sake of -0
  return v;
}
static inline VecI splat_int(int32_t x) {
  VecI v;
  CK_EACH v.p[i] = NativeI{} + x;
  return v;
}
static inline VecF operator+(VecF a, VecF b) {
  CK_EACH a.p[i] += b.p[i];
  return a;
}
static inline VecF operator-(VecF a, VecF b) {
  CK_EACH a.p[i] -= b.p[i];
  return a;
}
static inline VecF operator*(VecF a, VecF b) {
  CK_EACH a.p[i] *= b.p[i];
  return a;
}
static inline VecF operator/(VecF a, VecF b) {
  CK_EACH a.p[i] /= b.p[i];
  return a;
}
static inline VecF mul_add(VecF a, VecF b, VecF c) {
  CK_EACH c.p[i] = a.p[i] * b.p[i] + c.p[i];
  return c;
}
static inline VecI operator|(VecI a, VecI b) {
  CK_EACH a.p[i] |= b.p[i];
  return a;
}
static inline VecI operator&(VecI a, VecI b) {
  CK_EACH a.p[i] &= b.p[i];
  return a;
}
static inline VecI operator+(VecI a, VecI b) {
  CK_EACH a.p[i] += b.p[i];
  return a;
}
static inline VecI bits(VecF a) {
  VecI v;
  memcpy(&v, &a, sizeof v);
  return v;
}
static inline VecF from_bits(VecI a) {
  VecF v;
  memcpy(&v, &a, sizeof v);
  return v;
}
static inline VecI shift_left(VecI a, int by) {
  CK_EACH a.p[i] = a.p[i] << by;
  return a;
}
// Logical: the sign comes in as zeros.
static inline VecI shift_right(VecI a, int by) {
  typedef uint32_t NativeU __attribute__((vector_size(kNative * 4)));
  CK_EACH a.p[i] = (NativeI)((NativeU)a.p[i] >> by);
  return a;
}
static inline VecI less(VecF a, VecF b) {
  VecI v;
  CK_EACH v.p[i] = a.p[i] < b.p[i];
  return v;
}
static inline VecI at_most(VecI a, VecI b) {
  VecI v;
  CK_EACH v.p[i] = a.p[i] <= b.p[i];
  return v;
}
static inline VecI equal(VecF a, VecF b) {
  VecI v;
  CK_EACH v.p[i] = a.p[i] == b.p[i];
  return v;
}
// yes where the mask's bits are set; a selection, so that what is not chosen never enters arithmetic.
static inline VecF select(VecI mask, VecF yes, VecF no) {
  CK_EACH yes.p[i] = mask.p[i] ? yes.p[i] : no.p[i];
  return yes;
}
static inline VecF maximum(VecF a, VecF b) {
#if defined(__AVX512F__)
  a.p[0] = (NativeF)_mm512_max_ps((__m512)a.p[0], (__m512)b.p[0]);
  return a;
#else
  return select(less(b, a), a, b);  // as vmaxps: b where either is NaN
#endif
}

// e^x for x <= about 1; 0 far below -87; NaN stays NaN. x = n ln 2 + r; minimax polynomial of 2^f on |f| <= 1/2 in terms of r: 2e-9.
static inline VecF exp_of(VecF x) {
  // -inf is clamped first: -inf minus its own rounding is NaN. The constant comes first, so that a NaN in x survives the maximum.
  x = maximum(splat(-104.0f), x);
#if defined(__AVX512F__)
  VecF whole;
  whole.p[0] = (NativeF)_mm512_roundscale_ps((__m512)(x * splat(1.4426950408889634f)).p[0], 0);
#else
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VecF shifted = mul_add(x, splat(1.4426950408889634f), magic);
  const VecF whole = shifted - magic;
#endif
  const VecF r = mul_add(whole, splat(-0.6931471805599453f), x);
  VecF p = splat(1.383684521e-03f);
  p = mul_add(p, r, splat(8.374815800e-03f));
  p = mul_add(p, r, splat(4.166822558e-02f));
  p = mul_add(p, r, splat(1.666642017e-01f));
  p = mul_add(p, r, splat(4.999999208e-01f));
  p = mul_add(p, r, splat(1.000000036f));
  p = mul_add(p, r, splat(1.0f));
#if defined(__AVX512F__)
  p.p[0] = (NativeF)_mm512_scalef_ps((__m512)p.p[0], (__m512)whole.p[0]);
  return p;
#else
  VecI n = bits(shifted);
  CK_EACH n.p[i] = n.p[i] - 0x4b400000;
  const VecF scaled = from_bits(bits(p) + shift_left(n, 23));
  return select(less(x, splat(-87.0f)), splat(0.0f), scaled);
#endif
}

// tanh: an odd minimax polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel; that formula elsewhere.
static inline VecF tanh_of(VecF x) {
  const VecF magnitude = maximum(x, splat(0.0f) - x);
  const VecF z = x * x;
  VecF p = splat(-6.235559130e-03f);
  p = mul_add(p, z, splat(2.103967516e-02f));
  p = mul_add(p, z, splat(-5.384270718e-02f));
  p = mul_add(p, z, splat(1.333246075e-01f));
  p = mul_add(p, z, splat(-3.333331096e-01f));
  const VecF near = mul_add(p * z, x, x);
  // e^-2|x| <= 1 cannot overflow.
  const VecF e = exp_of(magnitude * splat(-2.0f));
  VecF far = (splat(1.0f) - e) / (splat(1.0f) + e);
  far = select(less(x, splat(0.0f)), splat(0.0f) - far, far);
  return select(less(magnitude, splat(0.55f)), near, far);
}

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

#undef CK_EACH

}  // namespace
}  // namespace carryover_kernels
