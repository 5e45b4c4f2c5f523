// Scalars: 16-bit floats to float and back, and the macro that makes one small function for g++, nvcc and the SIMT shim.
#pragma once

#include <stdint.h>
#include <string.h>

// Internal linkage on the host: code is compiled once per instruction set, and an AVX-512 copy of a weak symbol must not win at link time.
#if defined(__CUDACC__)
#define CK_HD static inline __host__ __device__
#else
#define CK_HD [[maybe_unused]] static inline
#endif

namespace carryover_kernels {

enum class Elem : int { f32, bf16, f16, e4m3, e5m2 };

CK_HD int64_t elem_size(Elem type) { return type == Elem::f32 ? 4 : type == Elem::bf16 || type == Elem::f16 ? 2 : 1; }

CK_HD float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

CK_HD uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

CK_HD float bfloat16_value(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

CK_HD float float16_value(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
  if (exponent == 31u) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0u) {  // a subnormal is mantissa * 2^-24, exact in float
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    return sign ? -value : value;
  }
  return bits_to_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

}  // namespace carryover_kernels
