// A call as the stages see it: where the tensors are, how the tokens are cut, which settings hold.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/read_index.h"
#include "core/settings.h"
#include "tfla/plan.h"

namespace tfla::cpu {

// A run of tokens with a state of its own: a row of the batch, or a packed sequence.
struct Sequence {
  std::int64_t index = 0;   // which state
  std::int64_t batch = 0;   // row of the tensors
  std::int64_t offset = 0;  // first token in that row
  std::int64_t length = 0;
  std::int64_t packed = 0;  // tokens of all sequences before it
};

[[nodiscard]] inline Sequence sequence_of(const MlstmShape& shape, const TensorView& cu_seqlens, std::int64_t index) {
  if (!cu_seqlens.given()) return {index, index, 0, shape.tokens, index * shape.tokens};
  const std::int64_t begin = read_index(cu_seqlens, index);
  return {index, 0, begin, read_index(cu_seqlens, index + 1) - begin, begin};
}

// Gates made of a time step, as the state space dual has them (stages/time_step.h): i of the problem holds dt, f
// nothing.
struct TimeStep {
  TensorView A;        // [H]
  TensorView bias;     // [H]    optional
  TensorView seq_idx;  // [B,T]  optional
  bool softplus = false;
  double least = 0;
  double most = 0;
  // Of backward, [H,tokens]: what the gradients of A and of the bias are sums of.
  double* A_terms = nullptr;
  double* bias_terms = nullptr;
};

// What follows the outputs of a scan without a denominator (stages/epilogue.h): (h + D v) silu(z).
struct Epilogue {
  TensorView D;        // [H] or [H,dhv]  optional
  TensorView z;        // [B,T,H,dhv]     optional
  TensorView ungated;  // [B,T,H,dhv]     backward: h + D v, where z is given

  [[nodiscard]] bool given() const { return D.given() || z.given(); }
};

struct Problem {
  const Plan& plan;
  Settings settings;
  TensorView q;  // [B,T,Hqk,dqk]
  TensorView k;  // [B,T,Hqk,dqk]
  TensorView v;  // [B,T,H,dhv]
  TensorView i;  // [B,T,H]
  TensorView f;  // [B,T,H]
  MlstmState initial_state;
  TensorView cu_seqlens;
  const TimeStep* time_step = nullptr;  // none: i and f are gates of the family of `settings`
  Epilogue epilogue = {};

  [[nodiscard]] std::int64_t heads() const { return plan.shape.heads; }
  [[nodiscard]] std::int64_t group() const { return plan.shape.heads / plan.shape.qk_heads; }
  [[nodiscard]] std::int64_t tokens() const { return plan.shape.batch * plan.shape.tokens; }
  [[nodiscard]] bool has_initial_state() const { return initial_state.C.given(); }
  [[nodiscard]] Sequence sequence(std::int64_t index) const { return sequence_of(plan.shape, cu_seqlens, index); }
};

struct ForwardOutputs {
  MutableTensorView h;             // [B,T,H,dhv]
  MutableMlstmState last_state;    // optional
  MutableTensorView ungated = {};  // [B,T,H,dhv]  optional: h before silu(z) of the epilogue
};

struct BackwardTensors {
  TensorView dh;                         // [B,T,H,dhv]
  MlstmStateGrad dlast_state;            // optional
  MutableTensorView dq;                  // [B,T,Hqk,dqk]
  MutableTensorView dk;                  // [B,T,Hqk,dqk]
  MutableTensorView dv;                  // [B,T,H,dhv]
  MutableTensorView di;                  // [B,T,H]
  MutableTensorView df;                  // [B,T,H]
  MutableMlstmStateGrad dinitial_state;  // optional
};

// ---------------------------------------------------------------- tiles within chunks
// Chunks start at multiples of plan.chunk within a sequence, tiles at multiples of plan.tile within a chunk.

[[nodiscard]] inline std::int64_t tile_end(const Plan& plan, std::int64_t begin, std::int64_t length) {
  const std::int64_t chunk_end = (begin / plan.chunk + 1) * plan.chunk;
  return std::min({begin + plan.tile, chunk_end, length});
}

[[nodiscard]] inline std::int64_t tile_begin(const Plan& plan, std::int64_t end) {
  const std::int64_t chunk_begin = (end - 1) / plan.chunk * plan.chunk;
  return chunk_begin + (end - 1 - chunk_begin) / plan.tile * plan.tile;
}

// ---------------------------------------------------------------- spans, numbered over all sequences
// Sequence s owns the numbers packed / span + s, ...: at least as many as it has spans, so some numbers stay unused.

[[nodiscard]] inline std::int64_t span_numbers(const Plan& plan) {
  return plan.shape.batch * plan.shape.tokens / plan.span + plan.shape.sequences;
}

[[nodiscard]] inline std::int64_t first_span(const Plan& plan, const Sequence& sequence) {
  return sequence.packed / plan.span + sequence.index;
}

struct Span {
  Sequence sequence;
  std::int64_t number = 0;
  std::int64_t begin = 0;  // tokens [begin, end) of the sequence; empty for an unused number
  std::int64_t end = 0;
};

[[nodiscard]] inline Span find_span(const Problem& problem, std::int64_t number) {
  std::int64_t low = 0;
  std::int64_t high = problem.plan.shape.sequences;  // the owner is in [low, high)
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (first_span(problem.plan, problem.sequence(middle)) <= number ? low : high) = middle;
  }
  const Sequence owner = problem.sequence(low);
  const std::int64_t begin = (number - first_span(problem.plan, owner)) * problem.plan.span;
  if (begin >= owner.length) return {owner, number, 0, 0};
  return {owner, number, begin, std::min(begin + problem.plan.span, owner.length)};
}

}  // namespace tfla::cpu
