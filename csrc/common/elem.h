// PyTorch's dtypes as the kernels' element types.
#pragma once

#include "check.h"
#include "scalar.h"

namespace carryover_kernels {

inline Elem elem_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return Elem::bf16;
    case ScalarType::Half: return Elem::f16;
    case ScalarType::Float8_e4m3fn: return Elem::e4m3;
    case ScalarType::Float8_e5m2: return Elem::e5m2;
    default: return Elem::f32;
  }
}

}  // namespace carryover_kernels
