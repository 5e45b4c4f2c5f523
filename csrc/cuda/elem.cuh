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

CK_DEVICE float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(kAllLanes, x, bits);
  return x;
}

}  // namespace carryover_kernels
