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

CK_DEVICE float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(kAllLanes, x, bits);
  return x;
}

}  // namespace carryover_kernels
