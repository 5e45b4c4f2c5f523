// markov_sample on the CPU. Steps follow each other; within a step W2 is read once for all requests, cut over the vocabulary.
#include "../common/elem.h"
#include "../common/arguments.h"
#include "carryover_kernels/ops.h"
#include "isa.h"
#include "rows.h"

#include <algorithm>

namespace carryover_kernels {
namespace {

// A colder request is sampled at this temperature: logit / T stays finite, or every token over 0 would tie at infinity.
constexpr float kColdest = 1e-30f;

// A contiguous matrix of any activation dtype.
struct Matrix {
  const char* values = nullptr;
  ScalarType type = ScalarType::Float;
  Elem elem = Elem::f32;
  int64_t rows = 0, columns = 0;

  Matrix() = default;
  explicit Matrix(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    values = static_cast<const char*>(tensor->const_data_ptr());
    type = tensor->scalar_type();
    elem = elem_of(*tensor);
    rows = tensor->size(0);
    columns = tensor->size(1);
  }

  const void* row(int64_t i) const { return values + i * columns * (type == ScalarType::Float ? 4 : 2); }

  // out[0 .. count) = rows first .. first + count - 1 times `vector`.
  void dot_rows(int64_t first, int64_t count, const float* vector, float* out) const {
    kernels().dot_rows(row(first), elem, count, columns, vector, out);
  }

  float dot_row(int64_t i, const float* vector) const {
    float sum;
    dot_rows(i, 1, vector, &sum);
    return sum;
  }
};

constexpr int64_t kPiece = 32;  // rows of W2: 16 KB at rank 256

double dot_in_double(const float* a, const float* b, int64_t count) {
  double sums[4] = {};  // one alone would wait for its own additions
  for (int64_t i = 0; i < count; ++i) sums[i % 4] += static_cast<double>(a[i]) * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

struct Heads {
  std::string head;
  Matrix w1, w2, weight, confidence;
  const float *bias, *confidence_bias;
  int64_t rank, hidden_size;

  // w = W1[previous], zeros for a token outside the table.
  void look_up(float* w, int64_t previous) const {
    if (previous >= 0 && previous < w1.rows) read_row(w, w1.row(previous), w1.type, 0, rank);
    else std::fill_n(w, rank, 0.0f);
  }

  // z from [h; w] (gated) or [state; w; h] (rnn, which also moves the state).
  void mix(float* z, float* state, const float* w, const float* h) const {
    if (head == "vanilla") {
      std::copy_n(w, rank, z);
      return;
    }
    std::vector<float> input;
    if (head == "gated") {
      input.assign(h, h + hidden_size);
      input.insert(input.end(), w, w + rank);
    } else {
      input.assign(state, state + rank);
      input.insert(input.end(), w, w + rank);
      input.insert(input.end(), h, h + hidden_size);
    }
    auto unit = [&](int64_t i) { return weight.dot_row(i, input.data()) + (bias ? bias[i] : 0.0f); };
    for (int64_t k = 0; k < rank; ++k) {
      if (head == "gated") {
        z[k] = sigmoid(unit(k)) * w[k];
      } else {
        const float gate = sigmoid(unit(k));
        state[k] = gate * state[k] + (1.0f - gate) * std::tanh(unit(rank + k));
        z[k] = std::tanh(unit(2 * rank + k));
      }
    }
  }

  // In double: one number a step, so its precision costs nothing.
  float confide(const float* w, const float* h) const {
    const auto* row = static_cast<const float*>(confidence.row(0));
    double logit = confidence_bias ? confidence_bias[0] : 0.0;
    logit += dot_in_double(row, h, hidden_size);
    if (confidence.columns > hidden_size) logit += dot_in_double(row + hidden_size, w, rank);
    return static_cast<float>(logit);
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> cpu::markov_sample(
    Tensor base_logits, Tensor anchor_tokens, std::optional<Tensor> markov_w1, std::optional<Tensor> markov_w2, std::string head,
    std::optional<Tensor> hidden, std::optional<Tensor> head_weight, std::optional<Tensor> head_bias,
    std::optional<Tensor> confidence_weight, std::optional<Tensor> confidence_bias, std::optional<Tensor> draft_to_target,
    std::optional<Tensor> temperature, std::optional<Tensor> seeds, std::optional<Tensor> offsets, bool return_logits,
    bool return_probs) {
  check_markov_sample(
      base_logits, anchor_tokens, markov_w1, markov_w2, head, hidden, head_weight, head_bias, confidence_weight, confidence_bias,
      draft_to_target, temperature, seeds, offsets);
  const int64_t r = markov_w1 ? markov_w1->size(1) : 0, h = hidden ? hidden->size(2) : 0;
  const int64_t requests = base_logits.size(0), steps = base_logits.size(1), vocab = base_logits.size(2);
  auto floats = [&](bool wanted, std::initializer_list<int64_t> shape) {
    const std::vector<int64_t> sizes = wanted ? std::vector<int64_t>(shape) : std::vector<int64_t>{0};
    return torch::stable::new_empty(base_logits, sizes, ScalarType::Float);
  };
  Tensor tokens = torch::stable::new_empty(anchor_tokens, {requests, steps});
  Tensor logits = floats(return_logits, {requests, steps, vocab});
  Tensor probs = floats(return_probs, {requests, steps, vocab});
  Tensor confidence = floats(confidence_weight.has_value(), {requests, steps});

  Heads heads{head, Matrix(markov_w1), Matrix(markov_w2), Matrix(head_weight), Matrix(confidence_weight), data<const float>(head_bias),
              data<const float>(confidence_bias), r, h};
  const auto* anchors = data<const int64_t>(anchor_tokens);
  const auto* remap = data<const int64_t>(draft_to_target);
  const auto* temperatures = data<const float>(temperature);
  auto* token_out = data<int64_t>(tokens);
  auto* logit_out = return_logits ? data<float>(logits) : nullptr;
  auto* prob_out = return_probs ? data<float>(probs) : nullptr;
  auto* confidence_out = confidence_weight ? data<float>(confidence) : nullptr;

  std::vector<float> w(requests * r), z(requests * r), state(requests * r, 0.0f), hidden_row(requests * h);
  std::vector<float> scratch(requests * vocab);
  const auto* base = static_cast<const char*>(base_logits.const_data_ptr());
  const int64_t element = base_logits.scalar_type() == ScalarType::Float ? 4 : 2;
  auto previous = [&](int64_t q, int64_t i) { return i == 0 ? anchors[q] : token_out[q * steps + i - 1]; };
  auto row_of = [&](int64_t q, int64_t i) { return logit_out ? logit_out + (q * steps + i) * vocab : scratch.data() + q * vocab; };

  for (int64_t i = 0; i < steps; ++i) {
    torch::stable::parallel_for(0, requests, 1, [&](int64_t begin, int64_t end) {
      for (int64_t q = begin; q < end; ++q) {
        if (anchors[q] < 0) continue;
        float* h_row = hidden_row.data() + q * h;
        if (hidden)
          read_row(h_row, static_cast<const char*>(hidden->const_data_ptr()) +
                       (q * hidden->stride(0) + i * hidden->stride(1)) * static_cast<int64_t>(hidden->element_size()),
                   hidden->scalar_type(), 0, h);
        if (r > 0) heads.look_up(w.data() + q * r, previous(q, i));
        if (head != "none") heads.mix(z.data() + q * r, state.data() + q * r, w.data() + q * r, h_row);
        if (confidence_out) confidence_out[q * steps + i] = heads.confide(w.data() + q * r, h_row);
      }
    });
    torch::stable::parallel_for(0, vocab, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t q = 0; q < requests; ++q)
        if (anchors[q] >= 0)
          read_row(row_of(q, i) + begin, base + (q * base_logits.stride(0) + i * base_logits.stride(1)) * element,
                   base_logits.scalar_type(), begin, end - begin);
      if (head == "none") return;
      // Pieces of rows that stay in L1: several requests read each from there.
      float bias[kPiece];
      for (int64_t v = begin; v < end; v += kPiece) {
        const int64_t count = std::min(kPiece, end - v);
        for (int64_t q = 0; q < requests; ++q) {
          if (anchors[q] < 0) continue;
          heads.w2.dot_rows(v, count, z.data() + q * r, bias);
          float* to = row_of(q, i) + v;
          for (int64_t j = 0; j < count; ++j) to[j] += bias[j];
        }
      }
    });
    torch::stable::parallel_for(0, requests, 1, [&](int64_t begin, int64_t end) {
      for (int64_t q = begin; q < end; ++q) {
        float* prob_row = prob_out ? prob_out + (q * steps + i) * vocab : nullptr;
        if (anchors[q] < 0) {
          token_out[q * steps + i] = -1;
          if (logit_out) std::fill_n(row_of(q, i), vocab, 0.0f);
          if (prob_row) std::fill_n(prob_row, vocab, 0.0f);
          if (confidence_out) confidence_out[q * steps + i] = 0.0f;
          continue;
        }
        const float* row = row_of(q, i);
        float t = temperatures ? temperatures[q] : 0.0f;
        if (t > 0) t = std::max(t, kColdest);
        const int64_t choice = t > 0
            ? gumbel_argmax([&](int64_t v) { return row[v] / t; }, vocab, data<const int64_t>(seeds)[q], data<const int64_t>(offsets)[q], i,
                            kStreamDraft)
            : first_argmax(row, vocab);
        if (prob_row && t > 0) {
          std::copy_n(row, vocab, prob_row);
          softmax_row(prob_row, vocab, t);
        } else if (prob_row) {
          std::fill_n(prob_row, vocab, 0.0f);
          prob_row[choice] = 1.0f;
        }
        token_out[q * steps + i] = choice + (remap ? remap[choice] : 0);
      }
    });
  }
  return {tokens, logits, probs, confidence};
}

STABLE_TORCH_LIBRARY_IMPL(carryover_kernels, CPU, m) { m.impl("markov_sample", TORCH_BOX(&cpu::markov_sample)); }

}  // namespace carryover_kernels
