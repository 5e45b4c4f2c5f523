// markov_sample's door on CUDA.
#include "markov_sample.cuh"

#include "../common/elem.h"
#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> markov_sample(
    Tensor base_logits, Tensor anchor_tokens, MaybeTensor markov_w1, MaybeTensor markov_w2, std::string head, MaybeTensor hidden,
    MaybeTensor head_weight, MaybeTensor head_bias, MaybeTensor confidence_weight, MaybeTensor confidence_bias,
    MaybeTensor draft_to_target, MaybeTensor temperature, MaybeTensor seeds, MaybeTensor offsets, bool return_logits, bool return_probs) {
  check_markov_sample(
      base_logits, anchor_tokens, markov_w1, markov_w2, head, hidden, head_weight, head_bias, confidence_weight, confidence_bias,
      draft_to_target, temperature, seeds, offsets);
  MarkovSampleParams p{};
  p.requests = base_logits.size(0), p.steps = base_logits.size(1), p.vocab = base_logits.size(2);
  p.splits = blocks_for(p.vocab, kMarkovSplit);
  const auto floats = [&](bool wanted, int64_t columns) {
    const int64_t sizes[] = {p.requests, p.steps, columns}, none[] = {0};
    return wanted ? torch::stable::new_empty(base_logits, {sizes, columns ? size_t{3} : size_t{2}}, ScalarType::Float)
                  : torch::stable::new_empty(base_logits, none, ScalarType::Float);
  };
  Tensor tokens = torch::stable::new_empty(anchor_tokens, {p.requests, p.steps});
  Tensor logits = floats(return_logits, p.vocab), probs = floats(return_probs, p.vocab), confidence = floats(confidence_weight.has_value(), 0);
  if (p.requests == 0 || p.steps == 0) return {tokens, logits, probs, confidence};

  p.tokens = data<int64_t>(tokens), p.anchor_tokens = data<const int64_t>(anchor_tokens);
  p.probs = return_probs ? data<float>(probs) : nullptr, p.confidence = confidence_weight ? data<float>(confidence) : nullptr;
  p.base_logits = base_logits.data_ptr(), p.base_type = elem_of(base_logits);
  p.stride_base_request = base_logits.stride(0), p.stride_base_row = base_logits.stride(1);
  if (markov_w1) {
    p.w1 = markov_w1->data_ptr(), p.w2 = markov_w2->data_ptr(), p.weight_type = elem_of(*markov_w1);
    p.table_rows = markov_w1->size(0), p.rank = markov_w1->size(1);
  }
  if (hidden) {
    p.hidden = hidden->data_ptr(), p.hidden_type = elem_of(*hidden), p.hidden_size = hidden->size(2);
    p.stride_hidden_request = hidden->stride(0), p.stride_hidden_row = hidden->stride(1);
  }
  p.head = head == "none" ? Head::none : head == "vanilla" ? Head::vanilla : head == "gated" ? Head::gated : Head::rnn;
  p.head_weight = head_weight ? head_weight->data_ptr() : nullptr, p.head_bias = data<const float>(head_bias);
  p.confidence_weight = data<const float>(confidence_weight), p.confidence_bias = data<const float>(confidence_bias);
  p.confidence_width = confidence_weight ? confidence_weight->size(1) : 0;
  p.draft_to_target = data<const int64_t>(draft_to_target), p.temperature = data<const float>(temperature);
  p.seeds = data<const int64_t>(seeds), p.offsets = data<const int64_t>(offsets);

  const int64_t of_splits = p.requests * p.splits, kept = return_probs && !return_logits ? p.requests * p.steps * p.vocab : 0;
  Workspace space(base_logits, 3 * p.requests * p.rank + 4 * of_splits + kept + 4);
  p.z = space.take<float>(p.requests * p.rank), p.state = space.take<float>(2 * p.requests * p.rank);
  p.best = space.take<float>(of_splits), p.most = space.take<float>(of_splits), p.sum = space.take<float>(of_splits);
  p.best_id = space.take<int32_t>(of_splits);
  p.logits = return_logits ? data<float>(logits) : return_probs ? space.take<float>(kept) : nullptr;

  constexpr int threads = 32 * kWarpsABlock;
  const int64_t parts = p.rank > kHeadUnits ? blocks_for(p.rank, kHeadUnits) : 1;
  for (p.step = 0; p.step < p.steps; ++p.step) {
    launch(markov_head_kernel, p.requests * parts, threads, base_logits, p);
    launch(markov_vocabulary_kernel, p.splits * blocks_for(p.requests, kRequestsAtOnce), threads, base_logits, p, sizeof(MarkovShared));
    if (return_probs) launch(markov_probs_kernel, of_splits, threads, base_logits, p);
  }
  launch(markov_head_kernel, p.requests, threads, base_logits, p);
  return {tokens, logits, probs, confidence};
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("markov_sample", TORCH_BOX(&markov_sample)); }

}  // namespace carryover_kernels::cuda
