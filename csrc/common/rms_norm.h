// The factor of an RMS norm, from a sum of squares that somebody else has left behind.
#pragma once

#include "scalar.h"

#ifndef __CUDA_ARCH__
#include <math.h>
#endif

namespace carryover_kernels {

// 1 / rms; eps is added to the mean square, inside the root.
CK_HD float rms_scale(float sum_of_squares, int64_t count, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(count) + eps);
}

}  // namespace carryover_kernels
