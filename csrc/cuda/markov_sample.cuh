// markov_sample: per step some blocks a request for the head, then the vocabulary in splits, and nothing returns to the host. The head's
// blocks of the next step pick the token from the splits' best, so N steps are 2 N + 1 launches in a row (3 N + 1 with probabilities).
#pragma once

#include "vocabulary.cuh"

namespace carryover_kernels {

enum class Head { none, vanilla, gated, rnn };

constexpr int kHeadUnits = 16;                       // of z, a block of the head
constexpr int kIdsAThread = 4, kRequestsAtOnce = 4;  // of the vocabulary's blocks
constexpr int kMarkovSplit = 32 * kWarpsABlock * kIdsAThread;

struct MarkovSampleParams {
  int64_t* tokens;
  float *confidence, *logits, *probs;  // logits: null where neither they nor probabilities are asked for
  const void *base_logits, *w1, *w2, *hidden, *head_weight;
  const float *head_bias, *confidence_weight, *confidence_bias, *temperature;
  const int64_t *anchor_tokens, *draft_to_target, *seeds, *offsets;
  int64_t stride_base_request, stride_base_row, stride_hidden_request, stride_hidden_row;
  int64_t requests, steps, vocab, splits, table_rows, rank, hidden_size, confidence_width;
  int step;
  Head head;
  Elem base_type, weight_type, hidden_type;
  // Workspace.
  float *z, *state;  // [requests, rank], [requests, 2, rank]: a step reads one state whole while it writes the other
  float *best, *most, *sum;  // [requests, splits]
  int32_t* best_id;
};

// A colder request is sampled at 1e-30: logit / T stays finite, or every token over 0 would tie at infinity.
CK_DEVICE float temperature_of(const MarkovSampleParams& p, int64_t r) {
  const float t = p.temperature ? p.temperature[r] : 0.0f;
  return t > 0.0f ? fmaxf(t, 1e-30f) : 0.0f;
}

CK_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// This lane's share of the product of `count` elements of two vectors.
CK_DEVICE float lane_product(const void* a, Elem a_type, const void* b, Elem b_type, int64_t count, int lane) {
  float sum = 0.0f;
  for (int64_t first = lane * 8; first < count; first += 256) {
    float x[8], y[8];
    load_chunk(x, a, a_type, first, count, 0.0f);
    load_chunk(y, b, b_type, first, count, 0.0f);
    sum += ((x[0] * y[0] + x[1] * y[1]) + (x[2] * y[2] + x[3] * y[3])) + ((x[4] * y[4] + x[5] * y[5]) + (x[6] * y[6] + x[7] * y[7]));
  }
  return sum;
}

// In double: the confidence is compared with a threshold, and its sum may nearly cancel.
CK_DEVICE double lane_product_in_double(const float* a, const void* b, Elem b_type, int64_t count, int lane) {
  double sum = 0.0;
  for (int64_t k = lane; k < count; k += 32) sum += static_cast<double>(a[k]) * load_one(b, b_type, k);
  return sum;
}

CK_DEVICE Best best_of_request(const MarkovSampleParams& p, int64_t r, int lane) {
  Best best{-INFINITY, kNoId};
  for (int64_t s = lane; s < p.splits; s += 32) keep_better(best, p.best[r * p.splits + s], p.best_id[r * p.splits + s]);
  return warp_best(best);
}

// Grid: requests * parts. Picks the token of step - 1, then owns kHeadUnits of z and of the state; the first part writes token and confidence.
CK_KERNEL void CK_BOUNDS(32 * kWarpsABlock, 4) markov_head_kernel(MarkovSampleParams p) {
  const int64_t parts = gridDim.x / p.requests, r = blockIdx.x / parts, part = blockIdx.x % parts;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool live = p.anchor_tokens[r] >= 0, last = p.step == p.steps;
  int64_t previous = p.anchor_tokens[r];
  if (p.step > 0 && live) {
    previous = id_of(best_of_request(p, r, lane));
    if (p.draft_to_target) previous += p.draft_to_target[previous];
  }
  if (p.step > 0 && part == 0 && threadIdx.x == 0) p.tokens[r * p.steps + p.step - 1] = live ? previous : -1;
  if (last) return;
  const bool known = p.w1 && previous >= 0 && previous < p.table_rows;  // a token outside the table has no row: zeros
  const void* w = known ? element_at(p.w1, p.weight_type, previous * p.rank) : nullptr;
  const int64_t w_count = known ? p.rank : 0;
  const void* h = p.hidden ? element_at(p.hidden, p.hidden_type, r * p.stride_hidden_request + p.step * p.stride_hidden_row) : nullptr;
  if (p.confidence && part == 0 && warp == 0) {
    double logit = 0.0;
    if (live) {
      logit = lane_product_in_double(p.confidence_weight, h, p.hidden_type, p.hidden_size, lane);
      if (p.confidence_width > p.hidden_size)
        logit += lane_product_in_double(p.confidence_weight + p.hidden_size, w, p.weight_type, w_count, lane);
    }
    for (int bits = 16; bits > 0; bits /= 2) logit += __shfl_xor_sync(kAllLanes, logit, bits);
    if (lane == 0) p.confidence[r * p.steps + p.step] = live ? static_cast<float>(logit + (p.confidence_bias ? p.confidence_bias[0] : 0.0f)) : 0.0f;
  }
  if (!live || p.head == Head::none) return;
  const float* old_state = p.state + (2 * r + p.step % 2) * p.rank;
  float* new_state = p.state + (2 * r + (p.step + 1) % 2) * p.rank;
  for (int64_t unit = part * kHeadUnits + warp; unit < (part + 1) * kHeadUnits && unit < p.rank; unit += kWarpsABlock) {
    float* z = p.z + r * p.rank + unit;
    const float own = known ? load_one(w, p.weight_type, unit) : 0.0f;
    if (p.head == Head::vanilla) {
      if (lane == 0) *z = own;
      continue;
    }
    // Rows unit, rank + unit, 2 rank + unit of the weight, whose columns are [h | w] (gated) or [state | w | h] (rnn).
    const bool gated = p.head == Head::gated;
    const int64_t columns = p.hidden_size + (gated ? 1 : 2) * p.rank;
    float gates[3] = {};
    CK_ROLLED
    for (int g = 0; g < (gated ? 1 : 3); ++g) {
      const int64_t row = g * p.rank + unit;
      int64_t first = 0;
      float sum = 0.0f;
      CK_ROLLED
      for (int piece = gated ? 1 : 0; piece < 3; ++piece) {
        const bool of_state = piece == 0, of_hidden = piece == (gated ? 1 : 2);
        const int64_t width = of_hidden ? p.hidden_size : p.rank;
        sum += lane_product(
            element_at(p.head_weight, p.weight_type, row * columns + first), p.weight_type, of_state ? old_state : of_hidden ? h : w,
            of_state ? Elem::f32 : of_hidden ? p.hidden_type : p.weight_type, of_state ? (p.step > 0 ? width : 0) : of_hidden ? width : w_count, lane);
        first += width;
      }
      const float gate = warp_sum(sum) + (p.head_bias ? p.head_bias[row] : 0.0f);
      gates[0] = g == 0 ? gate : gates[0], gates[1] = g == 1 ? gate : gates[1], gates[2] = g == 2 ? gate : gates[2];
    }
    if (lane) continue;
    const float keep = sigmoid(gates[0]);
    *z = gated ? keep * own : tanhf(gates[2]);
    if (!gated) new_state[unit] = keep * (p.step > 0 ? old_state[unit] : 0.0f) + (1.0f - keep) * tanhf(gates[1]);
  }
}

struct MarkovShared {
  Best best[kRequestsAtOnce][kWarpsABlock];
  float most[kRequestsAtOnce][kWarpsABlock], sum[kRequestsAtOnce][kWarpsABlock];
};

// Grid: splits * groups of requests. A thread owns kIdsAThread ids of kRequestsAtOnce requests: a row of w2 is read once for them all.
CK_KERNEL void CK_BOUNDS(32 * kWarpsABlock, 4) markov_vocabulary_kernel(MarkovSampleParams p) {
  MarkovShared& shared = shared_memory<MarkovShared>();
  const int64_t split = blockIdx.x % p.splits, first_request = blockIdx.x / p.splits * kRequestsAtOnce;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto id_at = [&](int i) { return split * kMarkovSplit + i * 32 * kWarpsABlock + threadIdx.x; };
  const auto live = [&](int q) { return first_request + q < p.requests && p.anchor_tokens[first_request + q] >= 0; };

  float bias[kIdsAThread][kRequestsAtOnce] = {};
  if (p.head != Head::none) {
    for (int64_t first = 0; first < p.rank; first += 8) {
      float w[kIdsAThread][8];
      CK_UNROLL
      for (int i = 0; i < kIdsAThread; ++i)
        load_chunk(w[i], element_at(p.w2, p.weight_type, id_at(i) * p.rank), p.weight_type, first, id_at(i) < p.vocab ? p.rank : 0, 0.0f);
      CK_UNROLL
      for (int q = 0; q < kRequestsAtOnce; ++q) {
        if (!live(q)) continue;
        float z[8];
        load_chunk(z, p.z + (first_request + q) * p.rank, first, p.rank, 0.0f);
        CK_UNROLL
        for (int i = 0; i < kIdsAThread; ++i)
          bias[i][q] += ((w[i][0] * z[0] + w[i][1] * z[1]) + (w[i][2] * z[2] + w[i][3] * z[3])) +
                        ((w[i][4] * z[4] + w[i][5] * z[5]) + (w[i][6] * z[6] + w[i][7] * z[7]));
      }
    }
  }
  CK_UNROLL
  for (int q = 0; q < kRequestsAtOnce; ++q) {
    const int64_t r = first_request + q;
    const bool there = live(q);
    const float t = there ? temperature_of(p, r) : 0.0f;
    float x[kIdsAThread];
    Best best{-INFINITY, kNoId};
    float most = -INFINITY;
    CK_UNROLL
    for (int i = 0; i < kIdsAThread; ++i) {
      const int64_t v = id_at(i);
      x[i] = -INFINITY;
      if (v >= p.vocab || r >= p.requests) continue;
      if (there) x[i] = load_one(p.base_logits, p.base_type, r * p.stride_base_request + p.step * p.stride_base_row + v) + bias[i][q];
      if (p.logits) p.logits[(r * p.steps + p.step) * p.vocab + v] = there ? x[i] : 0.0f;
      if (!there) continue;
      float score = x[i];
      if (t > 0.0f && score > -INFINITY) {
        const RandomWords words = random_words(p.seeds[r], p.offsets[r], p.step, kStreamDraft, static_cast<uint32_t>(v / 4));
        score = score / t + random_gumbel(v % 4 < 2 ? (v % 2 ? words.word[1] : words.word[0]) : (v % 2 ? words.word[3] : words.word[2]));
      }
      keep_better(best, score, static_cast<int>(v));
      most = fmaxf(most, x[i]);
    }
    best = warp_best(best);
    if (lane == 0) shared.best[q][warp] = best;
    if (!p.probs) continue;
    for (int bits = 16; bits > 0; bits /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, bits));
    float sum = 0.0f;
    CK_UNROLL
    for (int i = 0; i < kIdsAThread; ++i)
      if (t > 0.0f) sum += expf((x[i] - softmax_shift(most)) / t);
    sum = warp_sum(sum);
    if (lane == 0) shared.most[q][warp] = most, shared.sum[q][warp] = sum;
  }
  __syncthreads();
  const int q = static_cast<int>(threadIdx.x);
  if (q >= kRequestsAtOnce || !live(q)) return;
  const int64_t r = first_request + q, at = r * p.splits + split;
  Best best = shared.best[q][0];
  for (int i = 1; i < kWarpsABlock; ++i) keep_better(best, shared.best[q][i].value, shared.best[q][i].id);
  p.best[at] = best.value;
  p.best_id[at] = best.id;
  if (!p.probs) return;
  const float t = temperature_of(p, r);
  float most = -INFINITY, sum = 0.0f;
  for (int i = 0; i < kWarpsABlock; ++i) most = fmaxf(most, shared.most[q][i]);
  if (t > 0.0f)
    for (int i = 0; i < kWarpsABlock; ++i) sum += shared.sum[q][i] * expf((shared.most[q][i] - softmax_shift(most)) / t);
  p.most[at] = most;
  p.sum[at] = sum;
}

// Grid: splits * requests. softmax(logits / T) of one step from the splits' maxima and sums; one-hot where greedy, 0 for padding.
CK_KERNEL void CK_BOUNDS(32 * kWarpsABlock, 4) markov_probs_kernel(MarkovSampleParams p) {
  const int64_t split = blockIdx.x % p.splits, r = blockIdx.x / p.splits;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool live = p.anchor_tokens[r] >= 0;
  const float t = temperature_of(p, r);
  int64_t chosen = -1;
  float shift = 0.0f, inverse = 0.0f;
  if (live && t > 0.0f) {
    const float *most = p.most + r * p.splits, *sums = p.sum + r * p.splits;
    float top = -INFINITY, total = 0.0f;
    for (int64_t s = lane; s < p.splits; s += 32) top = fmaxf(top, most[s]);
    for (int bits = 16; bits > 0; bits /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, bits));
    shift = softmax_shift(top);
    for (int64_t s = lane; s < p.splits; s += 32) total += sums[s] * expf((most[s] - shift) / t);
    total = warp_sum(total);
    inverse = total > 0.0f ? 1.0f / total : 0.0f;
  } else if (live) {
    chosen = id_of(best_of_request(p, r, lane));
  }
  for (int i = 0; i < kIdsAThread; ++i) {
    const int64_t v = split * kMarkovSplit + i * 32 * kWarpsABlock + threadIdx.x, at = (r * p.steps + p.step) * p.vocab + v;
    if (v >= p.vocab) return;
    p.probs[at] = !live ? 0.0f : t > 0.0f ? expf((p.logits[at] - shift) / t) * inverse : v == chosen ? 1.0f : 0.0f;
  }
}

}  // namespace carryover_kernels
