// verify_draft: a warp reduces each split of each row, a block decides for each request, a warp samples each split of the row that was reached.
// A coin needs one probability a row (rejection) or one sum a row (block), so no request ever walks the vocabulary alone.
#pragma once

#include "rows.cuh"
#include "vocabulary.cuh"

namespace carryover_kernels {

enum class Verification { greedy, rejection, block };

struct VerifyDraftParams {
  int32_t *num_accepted, *num_rejected;
  int64_t* next_token;
  const int64_t *draft_tokens, *target_argmax, *seeds, *offsets;
  const int32_t* query_start_loc;
  const void* logits;        // null: target_argmax is given
  const float* draft_probs;  // null: the drafts were chosen, q is one-hot
  int64_t stride_logits, stride_q_request, stride_q_row;
  int64_t requests, columns, rows, vocab, splits;
  Verification method;
  // Workspace.
  float *split_most, *split_sum;  // [rows, splits]
  int32_t* split_id;
  float *row_shift, *row_inverse;  // [rows]: p = exp(logit - shift) * inverse
  int32_t* row_id;
  float *prefix, *mass;  // [requests, columns], [requests, columns, splits]
  float *weight, *best;  // [requests], [requests, 2, splits]
  int32_t* best_id;
};

struct Verified {
  int64_t first, rows;
  int drafts;  // that count: one that is no token ends the list
};

CK_DEVICE Verified verified(const VerifyDraftParams& p, int64_t r) {
  const Rows own = rows_of(p.query_start_loc, r, p.rows);
  Verified result{own.first, own.last - own.first, 0};
  const int64_t most = result.rows - 1 < p.columns ? result.rows - 1 : p.columns;
  while (result.drafts < most) {
    const int64_t draft = p.draft_tokens[r * p.columns + result.drafts];
    if (draft < 0 || (p.logits && draft >= p.vocab)) break;
    ++result.drafts;
  }
  return result;
}

struct Unit {
  int64_t index, split;
  int lane;
};

// A warp a split: grid of units * splits warps.
CK_DEVICE Unit unit_of(int64_t splits) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarpsABlock + threadIdx.x / 32;
  return {warp / splits, warp % splits, static_cast<int>(threadIdx.x % 32)};
}

template <class T>
CK_DEVICE const T* logits_row(const VerifyDraftParams& p, int64_t t) {
  return static_cast<const T*>(p.logits) + t * p.stride_logits;
}

template <class T>
CK_KERNEL void CK_BOUNDS(32 * kWarpsABlock, 4) verify_rows_kernel(VerifyDraftParams p) {
  const Unit unit = unit_of(p.splits);
  if (unit.index >= p.rows) return;
  const SplitState state = split_state(logits_row<T>(p, unit.index), unit.split, p.vocab, unit.lane);
  if (unit.lane) return;
  const int64_t at = unit.index * p.splits + unit.split;
  p.split_most[at] = state.best.value;
  p.split_id[at] = state.best.id;
  p.split_sum[at] = state.sum;
}

CK_DEVICE void finish(const VerifyDraftParams& p, int64_t r, const Verified& own, int accepted) {
  p.num_accepted[r] = accepted;
  p.num_rejected[r] = own.rows > 0 ? static_cast<int32_t>(own.rows - 1 - accepted) : 0;
}

// Block r: what the splits of its rows come to, then one warp takes the drafts, a lane each. For block verification only the weights P.
template <class T>
CK_KERNEL void CK_BOUNDS(32 * kWarpsABlock, 4) verify_decide_kernel(VerifyDraftParams p) {
  const int64_t r = blockIdx.x;
  const Verified own = verified(p, r);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool greedy = p.method == Verification::greedy;
  if (p.logits && own.rows > 0) {
    for (int i = warp; i <= own.drafts; i += kWarpsABlock) {
      const int64_t t = own.first + i, at = t * p.splits;
      const SplitState row = merge_splits(p.split_most + at, p.split_id + at, p.split_sum + at, p.splits, lane);
      if (lane) continue;
      p.row_id[t] = static_cast<int32_t>(id_of(row.best));
      p.row_shift[t] = softmax_shift(row.best.value);
      p.row_inverse[t] = row.sum > 0.0f ? 1.0f / row.sum : 0.0f;
    }
  }
  __syncthreads();
  if (warp) return;
  const auto argmax = [&](int i) { return p.logits ? p.row_id[own.first + i] : p.target_argmax[own.first + i]; };
  int accepted = 0;
  float prefix = 1.0f;
  for (int start = 0; start < own.drafts; start += 32) {
    const int i = start + lane;
    bool yes = false;
    float probability = 0.0f, q = 1.0f;
    if (i < own.drafts) {
      const int64_t draft = p.draft_tokens[r * p.columns + i], t = own.first + i;
      if (greedy) {
        yes = draft == argmax(i);
      } else {
        probability = expf(value_of(logits_row<T>(p, t)[draft]) - p.row_shift[t]) * p.row_inverse[t];
        if (p.draft_probs) q = p.draft_probs[r * p.stride_q_request + i * p.stride_q_row + draft];
        yes = random_uniform(random_words(p.seeds[r], p.offsets[r], i, kStreamAccept, 0).word[0]) * q < probability;
      }
    }
    const int here = own.drafts - start < 32 ? own.drafts - start : 32;
    if (p.method != Verification::block) {
      const unsigned votes = __ballot_sync(kAllLanes, yes);
      int kept = 0;
      while (kept < here && (votes >> kept & 1)) ++kept;
      accepted += kept;
      if (kept < here) break;
      continue;
    }
    for (int j = 0; j < here; ++j) {
      const float x = prefix * __shfl_sync(kAllLanes, probability, j), q_of_j = __shfl_sync(kAllLanes, q, j);
      prefix = x > 0.0f ? (q_of_j <= x ? 1.0f : x / q_of_j) : 0.0f;
      if (lane == j) p.prefix[r * p.columns + i] = prefix;
    }
  }
  if (lane || p.method == Verification::block) return;
  finish(p, r, own, accepted);
  if (greedy) p.next_token[r] = own.rows > 0 ? argmax(accepted) : -1;
  else p.weight[r] = 1.0f;
}

// weight * p(v) - q(v) of draft i in row t, and p(v) itself, for eight ids.
template <class T>
CK_DEVICE void residual_chunk(
    float (&left)[kChunk], float (&probability)[kChunk], const VerifyDraftParams& p, int64_t r, int64_t t, int i, float weight, int64_t first) {
  load_chunk(probability, logits_row<T>(p, t), first, p.vocab, -INFINITY);
  if (p.draft_probs) load_chunk(left, p.draft_probs + r * p.stride_q_request + i * p.stride_q_row, first, p.vocab, 0.0f);
  const int64_t chosen = p.draft_probs ? -1 : p.draft_tokens[r * p.columns + i];
  const float shift = p.row_shift[t], inverse = p.row_inverse[t];
  CK_UNROLL
  for (int j = 0; j < kChunk; ++j) {
    probability[j] = expf(probability[j] - shift) * inverse;
    left[j] = weight * probability[j] - (p.draft_probs ? left[j] : first + j == chosen ? 1.0f : 0.0f);
  }
}

// The sum over v of max(P_i p_{i+1}(v) - q_{i+1}(v), 0) over one split: unit r * columns + draft.
template <class T>
CK_KERNEL void CK_BOUNDS(32 * kWarpsABlock, 4) verify_mass_kernel(VerifyDraftParams p) {
  const Unit unit = unit_of(p.splits);
  if (unit.index >= p.requests * p.columns) return;
  const int64_t r = unit.index / p.columns;
  const int i = static_cast<int>(unit.index % p.columns) + 1;
  const Verified own = verified(p, r);
  if (i >= own.drafts) return;
  const float weight = p.prefix[unit.index];
  float sum = 0.0f;
  for (int c = 0; c < kChunksALane; ++c) {
    const int64_t first = chunk_start(unit.split, c, unit.lane);
    float left[kChunk], probability[kChunk], part = 0.0f;
    if (first >= p.vocab) break;
    residual_chunk<T>(left, probability, p, r, own.first + i, i, weight, first);
    CK_UNROLL
    for (int j = 0; j < kChunk; ++j) part += left[j] > 0.0f ? left[j] : 0.0f;
    sum += part;
  }
  sum = warp_sum(sum);
  if (unit.lane == 0) p.mass[unit.index * p.splits + unit.split] = sum;
}

// Block verification: a warp a request finds the longest prefix whose own coin says yes.
CK_KERNEL void CK_BOUNDS(32, 1) verify_prefix_kernel(VerifyDraftParams p) {
  const int64_t r = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const Verified own = verified(p, r);
  int accepted = 0;
  float weight = 1.0f;
  for (int i = 0; i < own.drafts; ++i) {
    const int64_t at = r * p.columns + i;
    const float prefix = p.prefix[at];
    float h = prefix;
    if (i + 1 < own.drafts) {
      float mass = 0.0f;
      for (int64_t s = lane; s < p.splits; s += 32) mass += p.mass[at * p.splits + s];
      mass = warp_sum(mass);
      const float below = mass + (1.0f - prefix);
      // Without mass and with prefix 1 the next draft cannot be rejected, so this coin is never the last one.
      h = below > 0.0f ? mass / below : 1.0f;
    }
    if (random_uniform(random_words(p.seeds[r], p.offsets[r], i, kStreamAccept, 0).word[0]) < h) {
      accepted = i + 1;
      weight = prefix;
    }
  }
  if (lane) return;
  finish(p, r, own, accepted);
  p.weight[r] = weight;
}

// The best of one split by the residual and by p itself: best[r, 0] and best[r, 1].
template <class T>
CK_KERNEL void CK_BOUNDS(32 * kWarpsABlock, 4) verify_sample_kernel(VerifyDraftParams p) {
  const Unit unit = unit_of(p.splits);
  const int64_t r = unit.index;
  if (r >= p.requests) return;
  const Verified own = verified(p, r);
  if (own.rows <= 0) return;
  const int accepted = p.num_accepted[r];
  const int64_t t = own.first + accepted, seed = p.seeds[r], offset = p.offsets[r];
  const float weight = p.weight[r];
  Best by_residual{-INFINITY, kNoId}, by_target{-INFINITY, kNoId};
  for (int c = 0; c < kChunksALane; ++c) {
    const int64_t first = chunk_start(unit.split, c, unit.lane);
    if (first >= p.vocab) break;
    float left[kChunk], probability[kChunk], noise[kChunk];
    if (accepted < own.drafts) {
      residual_chunk<T>(left, probability, p, r, t, accepted, weight, first);
    } else {
      load_chunk(probability, logits_row<T>(p, t), first, p.vocab, -INFINITY);
      CK_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        probability[j] = expf(probability[j] - p.row_shift[t]) * p.row_inverse[t];
        left[j] = 0.0f;
      }
    }
    chunk_noise(noise, seed, offset, accepted, kStreamNext, first);
    CK_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      const int id = static_cast<int>(first) + j;
      if (left[j] > 0.0f) keep_better(by_residual, logf(left[j]) + noise[j], id);
      if (probability[j] > 0.0f) keep_better(by_target, logf(probability[j]) + noise[j], id);
    }
  }
  by_residual = warp_best(by_residual);
  by_target = warp_best(by_target);
  if (unit.lane) return;
  const int64_t at = r * 2 * p.splits + unit.split;
  p.best[at] = by_residual.value;
  p.best_id[at] = by_residual.id;
  p.best[at + p.splits] = by_target.value;
  p.best_id[at + p.splits] = by_target.id;
}

// The residual's token, or the target's own where the residual has no mass.
CK_KERNEL void CK_BOUNDS(32, 1) verify_pick_kernel(VerifyDraftParams p) {
  const int64_t r = blockIdx.x;
  const Rows own = rows_of(p.query_start_loc, r, p.rows);
  const int lane = static_cast<int>(threadIdx.x);
  Best best{-INFINITY, kNoId};
  for (int choice = 0; choice < 2 && best.id == kNoId && own.last > own.first; ++choice) {
    const int64_t at = (r * 2 + choice) * p.splits;
    for (int64_t s = lane; s < p.splits; s += 32) keep_better(best, p.best[at + s], p.best_id[at + s]);
    best = warp_best(best);
  }
  if (lane == 0) p.next_token[r] = own.last > own.first ? id_of(best) : -1;
}

}  // namespace carryover_kernels
