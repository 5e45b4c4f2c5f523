// verify_draft's door on CUDA: greedy takes two launches, rejection four, block verification six.
#include "verify_draft.cuh"

#include "launch.h"

namespace carryover_kernels::cuda {
namespace {

template <class T>
void start(const VerifyDraftParams& p, const Tensor& on) {
  constexpr int threads = 32 * kWarpsABlock;
  if (p.logits) launch(verify_rows_kernel<T>, blocks_for(p.rows * p.splits, kWarpsABlock), threads, on, p);
  launch(verify_decide_kernel<T>, p.requests, threads, on, p);
  if (p.method == Verification::greedy) return;
  if (p.method == Verification::block) {
    launch(verify_mass_kernel<T>, blocks_for(p.requests * p.columns * p.splits, kWarpsABlock), threads, on, p);
    launch(verify_prefix_kernel, p.requests, 32, on, p);
  }
  launch(verify_sample_kernel<T>, blocks_for(p.requests * p.splits, kWarpsABlock), threads, on, p);
  launch(verify_pick_kernel, p.requests, 32, on, p);
}

std::tuple<Tensor, Tensor, Tensor> verify_draft(
    Tensor draft_tokens, Tensor query_start_loc, MaybeTensor target_logits, MaybeTensor target_argmax, MaybeTensor draft_probs,
    MaybeTensor seeds, MaybeTensor offsets, std::string method) {
  check_verify_draft(draft_tokens, query_start_loc, target_logits, target_argmax, draft_probs, seeds, offsets, method);
  VerifyDraftParams p{};
  p.requests = draft_tokens.size(0), p.columns = draft_tokens.size(1);
  Tensor num_accepted = torch::stable::new_empty(query_start_loc, {p.requests});
  Tensor next_token = torch::stable::new_empty(draft_tokens, {p.requests});
  Tensor num_rejected = torch::stable::new_empty(query_start_loc, {p.requests});
  p.num_accepted = data<int32_t>(num_accepted), p.num_rejected = data<int32_t>(num_rejected), p.next_token = data<int64_t>(next_token);
  p.draft_tokens = data<const int64_t>(draft_tokens), p.target_argmax = data<const int64_t>(target_argmax);
  p.seeds = data<const int64_t>(seeds), p.offsets = data<const int64_t>(offsets), p.query_start_loc = data<const int32_t>(query_start_loc);
  p.method = method == "greedy" ? Verification::greedy : method == "rejection" ? Verification::rejection : Verification::block;
  p.rows = target_logits ? target_logits->size(0) : target_argmax->size(0);
  if (target_logits) {
    p.logits = target_logits->data_ptr(), p.stride_logits = target_logits->stride(0), p.vocab = target_logits->size(1);
    p.splits = blocks_for(p.vocab, kSplit);
  }
  if (draft_probs) p.draft_probs = data<const float>(draft_probs), p.stride_q_request = draft_probs->stride(0), p.stride_q_row = draft_probs->stride(1);

  const int64_t of_rows = p.rows * p.splits, of_requests = p.requests * p.splits, drafts = p.requests * p.columns;
  Workspace space(query_start_loc, 3 * of_rows + 3 * p.rows + drafts * (1 + p.splits) + p.requests + 4 * of_requests);
  p.split_most = space.take<float>(of_rows), p.split_sum = space.take<float>(of_rows), p.split_id = space.take<int32_t>(of_rows);
  p.row_shift = space.take<float>(p.rows), p.row_inverse = space.take<float>(p.rows), p.row_id = space.take<int32_t>(p.rows);
  p.prefix = space.take<float>(drafts), p.mass = space.take<float>(drafts * p.splits), p.weight = space.take<float>(p.requests);
  p.best = space.take<float>(2 * of_requests), p.best_id = space.take<int32_t>(2 * of_requests);

  const ScalarType type = target_logits ? target_logits->scalar_type() : ScalarType::Float;
  if (type == ScalarType::Float) start<float>(p, draft_tokens);
  else if (type == ScalarType::BFloat16) start<BFloat16>(p, draft_tokens);
  else start<Float16>(p, draft_tokens);
  return {num_accepted, next_token, num_rejected};
}

}  // namespace

CARRYOVER_CUDA_IMPL(m) { m.impl("verify_draft", TORCH_BOX(&verify_draft)); }

}  // namespace carryover_kernels::cuda
