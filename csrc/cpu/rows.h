// Rows of logits in any activation dtype as floats, and the choices made from them. Shared by markov_sample and verify_draft.
#pragma once

#include "../common/check.h"
#include "../common/random.h"

#include <cmath>
#include <limits>

namespace carryover_kernels {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline void read_row(float* to, const void* from, ScalarType type, int64_t first, int64_t count) {
  if (type == ScalarType::Float) {
    std::copy_n(static_cast<const float*>(from) + first, count, to);
  } else if (type == ScalarType::BFloat16) {
    const auto* bits = static_cast<const uint16_t*>(from) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = bfloat16_value(bits[i]);
  } else {
    const auto* bits = static_cast<const uint16_t*>(from) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = float16_value(bits[i]);
  }
}

// The lowest index of the largest value; NaN never wins. 0 where nothing is above -inf.
inline int64_t first_argmax(const float* values, int64_t count) {
  int64_t best = 0;
  float most = -kInfinity;
  for (int64_t v = 0; v < count; ++v) {
    if (values[v] > most) {
      most = values[v];
      best = v;
    }
  }
  return best;
}

// argmax of log-weights plus Gumbel noise: a sample of softmax(log_weight). log_weight(v) may be -inf.
template <class LogWeight>
int64_t gumbel_argmax(LogWeight log_weight, int64_t count, int64_t seed, int64_t offset, int64_t step, int stream) {
  int64_t best = 0;
  float most = -kInfinity;
  RandomWords words{};
  for (int64_t v = 0; v < count; ++v) {
    if (v % 4 == 0) words = random_words(seed, offset, static_cast<int>(step), stream, static_cast<uint32_t>(v / 4));
    const float weight = log_weight(v);
    if (weight == -kInfinity) continue;
    const float value = weight + random_gumbel(words.word[v % 4]);
    if (value > most) {
      most = value;
      best = v;
    }
  }
  return best;
}

// softmax(values / temperature) in place; sums in double, so that V does not cost accuracy.
inline void softmax_row(float* values, int64_t count, float temperature) {
  float most = -kInfinity;
  for (int64_t v = 0; v < count; ++v) most = values[v] > most ? values[v] : most;
  const float shift = most == -kInfinity ? 0.0f : most;
  double sum = 0;
  for (int64_t v = 0; v < count; ++v) {
    values[v] = std::exp((values[v] - shift) / temperature);
    sum += values[v];
  }
  const float scale = sum > 0 ? static_cast<float>(1.0 / sum) : 0.0f;
  for (int64_t v = 0; v < count; ++v) values[v] *= scale;
}

}  // namespace carryover_kernels
