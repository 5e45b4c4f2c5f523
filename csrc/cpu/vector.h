// Vectors of 16 floats, compiled once per instruction set (kernels.cpp defines which).
// Everything here and in the other headers of the kernels has internal linkage: an AVX-512 copy of an inline function must not win at
// link time on a machine without it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
#elif defined(__AVX2__)
  CK_EACH a.p[i] = (NativeF)_mm256_max_ps((__m256)a.p[i], (__m256)b.p[i]);
  return a;
#else
  return select(less(b, a), a, b);  // as vmaxps: b where either is NaN
#endif
}

// e^x for x <= about 1; 0 far below -87; NaN stays NaN. x = n ln 2 + r; minimax polynomial of 2^f on |f| <= 1/2 in terms of r: 2e-9.
// Inlined by force: a call costs as much as the polynomial (vectors of two registers go through memory).
[[gnu::always_inline]] static inline VecF exp_of(VecF x) {
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
  // A NaN's payload may have been added into its exponent.
  return select(less(x, splat(-87.0f)), splat(0.0f), select(equal(x, x), scaled, x));
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

#undef CK_EACH

}  // namespace
}  // namespace carryover_kernels
