// Activation dtypes as floats: load, store and rounding to the nearest even.
#pragma once

#include "ptx.cuh"

namespace carryover_kernels {

CK_DEVICE float value_of(float x) { return x; }
CK_DEVICE float value_of(BFloat16 x) { return bfloat16_value(x.bits); }
CK_DEVICE float value_of(Float16 x) { return float16_value(x.bits); }

CK_DEVICE float nearest(float x, float) { return x; }

CK_DEVICE BFloat16 nearest(float x, BFloat16) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

CK_DEVICE Float16 nearest(float x, Float16) {
  const uint32_t bits = float_to_bits(x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (size > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (size >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // from halfway between the largest value and the next
  if (size < 0x38800000) {  // subnormal: the sum's last bit is worth 2^-24, so the addition rounds
    const float sum = bits_to_float(size) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_to_bits(sum) - 0x3f000000))};
  }
  const uint32_t shifted = size - 0x38000000;
  return {static_cast<uint16_t>(sign | ((shifted + 0xfff + (shifted >> 13 & 1)) >> 13))};
}

CK_DEVICE void widen(float (&x)[8], const float* from) {
  CK_UNROLL
  for (int i = 0; i < 2; ++i) {
    const Words words = load_words(from + 4 * i);
    CK_UNROLL
    for (int j = 0; j < 4; ++j) x[4 * i + j] = bits_to_float(words.word[j]);
  }
}

template <class T>
CK_DEVICE void widen(float (&x)[8], const T* from) {
  const Words words = load_words(from);
  CK_UNROLL
  for (int j = 0; j < 8; ++j) x[j] = value_of(T{static_cast<uint16_t>(words.word[j / 2] >> j % 2 * 16)});
}

// Elements first .. first + 7 of a row of `count`; `otherwise` for those past its end. 16 bytes at a time where the address allows it.
template <class T>
CK_DEVICE void load_chunk(float (&x)[8], const T* row, int64_t first, int64_t count, float otherwise) {
  if (first + 8 <= count && aligned(row + first)) {
    widen(x, row + first);
    return;
  }
  CK_UNROLL
  for (int j = 0; j < 8; ++j) x[j] = first + j < count ? value_of(row[first + j]) : otherwise;
}

struct Fp8 {  // of e4m3 or e5m2
  uint8_t bits;
};

// e4m3 has no infinity: 0x7f is NaN. e5m2 is f16 cut to 8 bits.
CK_DEVICE float value_of(Fp8 x, Elem type) {
  if (type == Elem::e5m2) return float16_value(static_cast<uint16_t>(x.bits << 8));
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24, size = x.bits & 0x7f;
  if (size == 0x7f) return bits_to_float(sign | 0x7fc00000);
  if (size < 8) {  // subnormal: multiples of 2^-9
    const float value = static_cast<float>(size) * 0.001953125f;
    return sign ? -value : value;
  }
  return bits_to_float(sign | ((size << 20) + (120u << 23)));
}

// The same of a tensor whose type only the launch knows; a warp agrees on it.
CK_DEVICE void load_chunk(float (&x)[8], const void* row, Elem type, int64_t first, int64_t count, float otherwise) {
  if (type == Elem::e4m3 || type == Elem::e5m2) {
    CK_UNROLL
    for (int j = 0; j < 8; ++j) x[j] = first + j < count ? value_of(static_cast<const Fp8*>(row)[first + j], type) : otherwise;
    return;
  }
  if (type == Elem::f32) load_chunk(x, static_cast<const float*>(row), first, count, otherwise);
  else if (type == Elem::bf16) load_chunk(x, static_cast<const BFloat16*>(row), first, count, otherwise);
  else load_chunk(x, static_cast<const Float16*>(row), first, count, otherwise);
}

CK_DEVICE float load_one(const void* row, Elem type, int64_t i) {
  if (type == Elem::f32) return static_cast<const float*>(row)[i];
  if (type == Elem::bf16) return value_of(static_cast<const BFloat16*>(row)[i]);
  return value_of(static_cast<const Float16*>(row)[i]);
}

// Eight values to elements first .. first + 7 of a row of `count`; those past its end are dropped.
template <class T>
CK_DEVICE void store_chunk(T* row, int64_t first, int64_t count, const float (&x)[8]) {
  if (sizeof(T) == 2 && first + 8 <= count && aligned(row + first)) {
    Words words;
    CK_UNROLL
    for (int j = 0; j < 8; j += 2) {
      const T low = nearest(x[j], T{}), high = nearest(x[j + 1], T{});
      uint16_t bits[2];
      memcpy(&bits[0], &low, 2);
      memcpy(&bits[1], &high, 2);
      words.word[j / 2] = bits[0] | static_cast<uint32_t>(bits[1]) << 16;
    }
    store_words(row + first, words);
    return;
  }
  if (sizeof(T) == 4 && first + 8 <= count && aligned(row + first)) {
    CK_UNROLL
    for (int i = 0; i < 8; i += 4)
      store_words(row + first + i, {{float_to_bits(x[i]), float_to_bits(x[i + 1]), float_to_bits(x[i + 2]), float_to_bits(x[i + 3])}});
    return;
  }
  CK_UNROLL
  for (int j = 0; j < 8; ++j)
    if (first + j < count) row[first + j] = nearest(x[j], T{});
}

// To the nearest even; fp8 saturates at its largest finite value.
CK_DEVICE Fp8 nearest_fp8(float x, Elem type) {
  const int kept = type == Elem::e4m3 ? 3 : 2, bias = type == Elem::e4m3 ? 7 : 15, cut = 23 - kept;
  const float largest = type == Elem::e4m3 ? 448.0f : 57344.0f, smallest_normal = bits_to_float(static_cast<uint32_t>(128 - bias) << 23);
  const uint32_t sign = float_to_bits(x) >> 24 & 0x80;
  float size = fabsf(x);
  if (x != x) return {static_cast<uint8_t>(sign | 0x7f)};
  if (size > largest) size = largest;
  if (size < smallest_normal) {  // a sum whose last bit is worth the step of the subnormals
    const float shift = smallest_normal * bits_to_float(static_cast<uint32_t>(127 + cut) << 23);
    return {static_cast<uint8_t>(sign | (float_to_bits(size + shift) - float_to_bits(shift)))};
  }
  const uint32_t bits = float_to_bits(size);
  const uint32_t rounded = (bits + ((1u << (cut - 1)) - 1) + (bits >> cut & 1)) >> cut;
  return {static_cast<uint8_t>(sign | (rounded - (static_cast<uint32_t>(127 - bias) << kept)))};
}

CK_DEVICE void store_chunk(void* row, Elem type, int64_t first, int64_t count, const float (&x)[8]) {
  if (type == Elem::f32) return store_chunk(static_cast<float*>(row), first, count, x);
  if (type == Elem::bf16) return store_chunk(static_cast<BFloat16*>(row), first, count, x);
  if (type == Elem::f16) return store_chunk(static_cast<Float16*>(row), first, count, x);
  CK_UNROLL
  for (int j = 0; j < 8; ++j)
    if (first + j < count) static_cast<Fp8*>(row)[first + j] = nearest_fp8(x[j], type);
}

CK_DEVICE void store_one(void* row, Elem type, int64_t i, float x) {
  if (type == Elem::f32) static_cast<float*>(row)[i] = x;
  else if (type == Elem::bf16) static_cast<BFloat16*>(row)[i] = nearest(x, BFloat16{});
  else static_cast<Float16*>(row)[i] = nearest(x, Float16{});
}

CK_DEVICE void* element_at(void* values, Elem type, int64_t i) { return static_cast<char*>(values) + i * elem_size(type); }
CK_DEVICE const void* element_at(const void* values, Elem type, int64_t i) { return static_cast<const char*>(values) + i * elem_size(type); }

CK_DEVICE float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(kAllLanes, x, bits);
  return x;
}

}  // namespace carryover_kernels
