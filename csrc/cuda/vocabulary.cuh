// Rows over a vocabulary, cut into splits of kSplit ids with a warp each: loads, the largest value and its lowest id, softmax terms, noise.
#pragma once

#include "../common/online_softmax.h"
#include "../common/random.h"
#include "elem.cuh"

namespace carryover_kernels {

constexpr int kChunk = 8, kChunksALane = 4, kSplit = 32 * kChunk * kChunksALane, kNoId = 0x7fffffff;
constexpr int kWarpsABlock = 4;

struct Best {
  float value;
  int id;  // kNoId where nothing is above -inf
};

CK_DEVICE void keep_better(Best& best, float value, int id) {
  if (value > best.value || (value == best.value && id < best.id && value > -INFINITY)) best = {value, id};
}

CK_DEVICE Best warp_best(Best best) {
  for (int bits = 16; bits > 0; bits /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, best.value, bits);
    const int id = __shfl_xor_sync(kAllLanes, best.id, bits);
    keep_better(best, value, id);
  }
  return best;
}

// A row without a token above -inf gives id 0, as every backend does.
CK_DEVICE int64_t id_of(Best best) { return best.id == kNoId ? 0 : best.id; }

// First id of chunk c of this lane.
CK_DEVICE int64_t chunk_start(int64_t split, int c, int lane) { return split * kSplit + (c * 32 + lane) * kChunk; }

struct SplitState {
  Best best;
  float sum;  // of exp(value - best.value)
};

// One split of one row: all loads are under way before the first is used.
template <class T>
CK_DEVICE SplitState split_state(const T* row, int64_t split, int64_t vocab, int lane) {
  float x[kChunksALane][kChunk];
  CK_UNROLL
  for (int c = 0; c < kChunksALane; ++c) load_chunk(x[c], row, chunk_start(split, c, lane), vocab, -INFINITY);
  Best best{-INFINITY, kNoId};
  CK_UNROLL
  for (int c = 0; c < kChunksALane; ++c) {
    CK_UNROLL
    for (int j = 0; j < kChunk; ++j) keep_better(best, x[c][j], static_cast<int>(chunk_start(split, c, lane)) + j);
  }
  best = warp_best(best);
  const float shift = softmax_shift(best.value);
  float sum = 0.0f;
  CK_UNROLL
  for (int c = 0; c < kChunksALane; ++c) {
    float part = 0.0f;
    CK_UNROLL
    for (int j = 0; j < kChunk; ++j) part += expf(x[c][j] - shift);
    sum += part;
  }
  return {best, warp_sum(sum)};
}

// What the splits of a row come to; `stride` between one split's entries and the next one's is 1.
CK_DEVICE SplitState merge_splits(const float* most, const int32_t* id, const float* sum, int64_t splits, int lane) {
  Best best{-INFINITY, kNoId};
  for (int64_t s = lane; s < splits; s += 32) keep_better(best, most[s], id[s]);
  best = warp_best(best);
  float total = 0.0f;
  const float shift = softmax_shift(best.value);
  for (int64_t s = lane; s < splits; s += 32) total += sum[s] * expf(most[s] - shift);
  return {best, warp_sum(total)};
}

// Gumbel noise of ids first .. first + 7; first is a multiple of 4.
CK_DEVICE void chunk_noise(float (&noise)[kChunk], int64_t seed, int64_t offset, int step, int stream, int64_t first) {
  CK_UNROLL
  for (int quad = 0; quad < kChunk / 4; ++quad) {
    const RandomWords words = random_words(seed, offset, step, stream, static_cast<uint32_t>(first / 4 + quad));
    CK_UNROLL
    for (int j = 0; j < 4; ++j) noise[quad * 4 + j] = random_gumbel(words.word[j]);
  }
}

}  // namespace carryover_kernels
