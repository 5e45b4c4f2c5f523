// verify_draft on the CPU: greedy, rejection and block verification. Requests are independent and run in parallel.
#include "carryover_kernels/ops.h"
#include "../common/arguments.h"
#include "rows.h"

#include <algorithm>

namespace carryover_kernels {
namespace {

struct Request {
  const Tensor* logits;  // null: argmax is given
  const int64_t* argmax;
  const int64_t* drafts;
  int64_t first_row, num_drafts, vocab;
  const float* probs;  // null: the drafts were chosen, q is one-hot
  int64_t probs_stride;
  int64_t seed, offset;

  void read(float* to, int64_t row) const {
    const auto* base = static_cast<const char*>(logits->const_data_ptr());
    const int64_t bytes = (first_row + row) * logits->stride(0) * static_cast<int64_t>(logits->element_size());
    read_row(to, base + bytes, logits->scalar_type(), 0, vocab);
  }

  float q(int64_t i, int64_t v) const { return probs ? probs[i * probs_stride + v] : v == drafts[i] ? 1.0f : 0.0f; }

  float coin(int64_t i) const { return random_uniform(random_words(seed, offset, static_cast<int>(i), kStreamAccept, 0).word[0]); }
};

struct Choice {
  int64_t accepted, token;
};

Choice greedy(const Request& request, std::vector<float>& row) {
  auto best = [&](int64_t i) {
    if (!request.logits) return request.argmax[request.first_row + i];
    request.read(row.data(), i);
    return first_argmax(row.data(), request.vocab);
  };
  int64_t accepted = 0, token = best(0);
  while (accepted < request.num_drafts && request.drafts[accepted] == token) token = best(++accepted);
  return {accepted, token};
}

// A sample of max(weight * p - q, 0), or of p where that has no mass; q of draft `accepted`, or nothing after the last draft.
int64_t sample_residual(const Request& request, const std::vector<float>& p, float weight, int64_t accepted) {
  bool has_mass = false;
  if (accepted < request.num_drafts)
    for (int64_t v = 0; v < request.vocab && !has_mass; ++v) has_mass = weight * p[v] - request.q(accepted, v) > 0;
  auto log_weight = [&](int64_t v) {
    const float left = has_mass ? weight * p[v] - request.q(accepted, v) : p[v];
    return left > 0 ? std::log(left) : -kInfinity;
  };
  return gumbel_argmax(log_weight, request.vocab, request.seed, request.offset, accepted, kStreamNext);
}

Choice rejection(const Request& request, std::vector<float>& p) {
  int64_t accepted = 0;
  for (;; ++accepted) {
    request.read(p.data(), accepted);
    softmax_row(p.data(), request.vocab, 1.0f);
    if (accepted == request.num_drafts) break;
    const int64_t draft = request.drafts[accepted];
    if (!(request.coin(accepted) * request.q(accepted, draft) < p[draft])) break;
  }
  return {accepted, sample_residual(request, p, 1.0f, accepted)};
}

Choice block(const Request& request, std::vector<float>& p) {
  // The prefix of i drafts stands with weight P_i; the last i whose coin says yes wins, so its P is kept until it is known.
  int64_t accepted = 0;
  float prefix = 1.0f, accepted_prefix = 1.0f;
  request.read(p.data(), 0);
  softmax_row(p.data(), request.vocab, 1.0f);
  for (int64_t i = 1; i <= request.num_drafts; ++i) {
    const int64_t draft = request.drafts[i - 1];
    const float x = prefix * p[draft], q = request.q(i - 1, draft);
    prefix = x > 0 ? (q <= x ? 1.0f : x / q) : 0.0f;
    request.read(p.data(), i);
    softmax_row(p.data(), request.vocab, 1.0f);
    float h = prefix;
    if (i < request.num_drafts) {
      double mass = 0;
      for (int64_t v = 0; v < request.vocab; ++v) mass += std::max(prefix * p[v] - request.q(i, v), 0.0f);
      // Without mass and with prefix 1 the next draft cannot be rejected, so this coin is never the last one.
      h = mass + 1.0 - prefix > 0 ? static_cast<float>(mass / (mass + 1.0 - prefix)) : 1.0f;
    }
    if (request.coin(i - 1) < h) {
      accepted = i;
      accepted_prefix = prefix;
    }
  }
  if (accepted != request.num_drafts) {
    request.read(p.data(), accepted);
    softmax_row(p.data(), request.vocab, 1.0f);
  }
  return {accepted, sample_residual(request, p, accepted_prefix, accepted)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cpu::verify_draft(
    Tensor draft_tokens, Tensor query_start_loc, std::optional<Tensor> target_logits, std::optional<Tensor> target_argmax,
    std::optional<Tensor> draft_probs, std::optional<Tensor> seeds, std::optional<Tensor> offsets, std::string method) {
  check_verify_draft(draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method);
  const int64_t requests = draft_tokens.size(0), columns = draft_tokens.size(1);
  const int64_t total = target_logits ? target_logits->size(0) : target_argmax->size(0);
  const int64_t vocab = target_logits ? target_logits->size(1) : 0;
  Tensor num_accepted = torch::stable::new_empty(query_start_loc, {requests});
  Tensor next_token = torch::stable::new_empty(draft_tokens, {requests});
  Tensor num_rejected = torch::stable::new_empty(query_start_loc, {requests});

  const auto* starts = data<const int32_t>(query_start_loc);
  const auto* drafts = data<const int64_t>(draft_tokens);
  auto* accepted_out = data<int32_t>(num_accepted);
  auto* token_out = data<int64_t>(next_token);
  auto* rejected_out = data<int32_t>(num_rejected);

  torch::stable::parallel_for(0, requests, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(vocab));
    for (int64_t r = begin; r < end; ++r) {
      const int64_t first = std::clamp<int64_t>(starts[r], 0, total), n = std::clamp<int64_t>(starts[r + 1], first, total) - first;
      accepted_out[r] = rejected_out[r] = 0;
      token_out[r] = -1;
      if (n <= 0) continue;
      Request request{};
      request.logits = target_logits ? &*target_logits : nullptr;
      request.argmax = data<const int64_t>(target_argmax);
      request.drafts = drafts + r * columns;
      request.first_row = first;
      request.vocab = vocab;
      // A draft that is no token ends the list: the next token comes from its row's own distribution.
      const int64_t bound = target_logits ? vocab : std::numeric_limits<int64_t>::max();
      while (request.num_drafts < std::min(n - 1, columns) && request.drafts[request.num_drafts] >= 0 &&
             request.drafts[request.num_drafts] < bound)
        ++request.num_drafts;
      if (method != "greedy") {
        if (draft_probs) {
          request.probs = data<const float>(draft_probs) + r * draft_probs->stride(0);
          request.probs_stride = draft_probs->stride(1);
        }
        request.seed = data<const int64_t>(seeds)[r];
        request.offset = data<const int64_t>(offsets)[r];
      }
      const Choice choice =
          method == "greedy" ? greedy(request, row) : method == "rejection" ? rejection(request, row) : block(request, row);
      accepted_out[r] = static_cast<int32_t>(choice.accepted);
      token_out[r] = choice.token;
      rejected_out[r] = static_cast<int32_t>(n - 1 - choice.accepted);
    }
  });
  return {num_accepted, next_token, num_rejected};
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("verify_draft", TORCH_BOX(&cpu::verify_draft)); }

}  // namespace carryover_kernels
