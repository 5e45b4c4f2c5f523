// The state of an online softmax over keys that come in parts: maximum, denominator, and the rules where a part is empty.
// Scores are in log2 units (scale * log2(e) folded in), so that exp2 is the only exponential.
#pragma once

#include "scalar.h"

#ifndef __CUDA_ARCH__
#include <math.h>
#endif

namespace carryover_kernels {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// m = -inf and d = 0 where no key has been seen.
struct SoftmaxState {
  float m, d;
};

CK_HD SoftmaxState softmax_empty() { return {-INFINITY, 0.0f}; }

// What to subtract from a score: -inf minus -inf is NaN, so an empty state subtracts 0.
CK_HD float softmax_shift(float m) { return m == -INFINITY ? 0.0f : m; }

struct SoftmaxWeights {
  SoftmaxState state;
  float first, second;  // factors of the two parts' unnormalised outputs
};

CK_HD SoftmaxWeights softmax_merge(SoftmaxState first, SoftmaxState second) {
  const float m = first.m > second.m ? first.m : second.m;
  const float shift = softmax_shift(m);
  const float a = exp2f(first.m - shift), b = exp2f(second.m - shift);
  return {{m, first.d * a + second.d * b}, a, b};
}

// A head's sink joins the denominator and brings no value. Rows without a key stay empty. sink_log2 = sink * log2(e).
// Returns the factor for the output; the sink may move the maximum, so that a large sink cannot overflow exp2.
CK_HD float softmax_add_sink(SoftmaxState& state, float sink_log2) {
  if (state.d == 0.0f) return 1.0f;
  const SoftmaxWeights merged = softmax_merge(state, {sink_log2, 1.0f});
  state = merged.state;
  return merged.first;
}

// 1 / denominator; a row without a key gives 0, not 0 / 0. NaN scores leave m alone and make d NaN, so that d tells who saw no key.
CK_HD float softmax_inverse(SoftmaxState state) { return state.d == 0.0f ? 0.0f : 1.0f / state.d; }

// Natural log of the denominator; -inf where no key was seen.
CK_HD float softmax_lse(SoftmaxState state) {
  return state.d == 0.0f ? -INFINITY : (state.m + log2f(state.d)) * kLn2;
}

}  // namespace carryover_kernels
