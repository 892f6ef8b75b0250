#include "plan/cost/plan_cost.h"

#include <algorithm>
#include <numeric>

#include "plan/cpu_sizes.h"
#include "tfla/analysis.h"

namespace tfla {

namespace {

// A run of tokens that starts at a chunk, cut into tiles.
struct Cut {
  double tokens = 0;
  double first = 0;    // tokens of its first tile
  double last = 0;     // and of its last
  double squares = 0;  // sum over tiles of tokens^2
};

Cut cut(std::int64_t tokens, std::int64_t chunk, std::int64_t tile) {
  const auto squares = [tile](std::int64_t length) {
    const std::int64_t rest = length % tile;
    return static_cast<double>(length / tile) * static_cast<double>(tile * tile) + static_cast<double>(rest * rest);
  };
  const std::int64_t rest = tokens % chunk;
  const std::int64_t final_chunk = rest == 0 ? std::min(chunk, tokens) : rest;
  const std::int64_t final_tile = final_chunk % tile == 0 ? std::min(tile, final_chunk) : final_chunk % tile;
  return {.tokens = static_cast<double>(tokens),
          .first = static_cast<double>(std::min({tokens, chunk, tile})),
          .last = static_cast<double>(final_tile),
          .squares = static_cast<double>(tokens / chunk) * squares(chunk) + squares(rest)};
}

// Matrix products of one head of one sequence: tokens that meet a state, 2 dqk dhv operations each, and elements of
// squares, 2 dqk or 2 dhv each.
struct Work {
  double state = 0;
  double square_qk = 0;
  double square_hv = 0;

  [[nodiscard]] double flops(const MlstmShape& shape) const {
    const auto dqk = static_cast<double>(shape.dqk);
    const auto dhv = static_cast<double>(shape.dhv);
    return 2 * (state * dqk * dhv + square_qk * dqk + square_hv * dhv);
  }
};

// The first tile meets no state, the last leaves none. Forward: q meets C, k and v make it. Backward: C is made once
// more; q and dh meet C and make dC; k and v meet dC.
double state_tokens(bool backward, const Cut& sequence) {
  const double after_first = sequence.tokens - sequence.first;
  const double before_last = sequence.tokens - sequence.last;
  return backward ? 2 * after_first + 3 * before_last : after_first + before_last;
}

// The share of heads that make scores of their own in the CPU's forward: of heads abreast those of a group share
// theirs.
double own_scores(const Plan& plan) {
  if (plan.device == Device::cuda || plan.operation != Operation::forward) return 1;
  const std::int64_t group = plan.shape.heads / plan.shape.qk_heads, abreast = plan.abreast;
  // Every `abreast` heads begin anew, and so does every group.
  const std::int64_t both = std::lcm(group, abreast);
  return static_cast<double>(both / group + both / abreast - 1) / static_cast<double>(both);
}

Work useful(const Plan& plan) {
  const std::int64_t tokens = plan.shape.longest;
  if (plan.formulation == Formulation::recurrent) return {.state = 2 * static_cast<double>(tokens)};
  const bool backward = plan.operation == Operation::backward;
  const auto needed =
      analysis::products(backward ? analysis::Pass::backward : analysis::Pass::forward, plan.formulation);
  // The CPU works chunkwise by tiles, a GPU by chunks.
  const std::int64_t unit = plan.device == Device::cuda ? plan.chunk : plan.tile;
  const Cut sequence = cut(tokens, plan.chunk, unit);
  Work work{.square_qk = 0.5 * needed.square_qk * own_scores(plan) * sequence.squares,
            .square_hv = 0.5 * needed.square_hv * sequence.squares};
  if (plan.formulation == Formulation::chunkwise) work.state = state_tokens(backward, sequence);
  return work;
}

// Pairs of blocks on and below the diagonal of a sequence, as elements.
double causal_blocks(std::int64_t tokens, std::int64_t block) {
  if (tokens == 0) return 0;
  const Cut blocks = cut(tokens, tokens, block);
  return 0.5 * (blocks.tokens * blocks.tokens + blocks.squares);
}

// As src/cpu/formulations/parallel_*.cc go through squares: backward forms S and dS for the rows and again for the
// columns.
Work parallel_on_cpu(const Plan& plan) {
  const double squares = causal_blocks(plan.shape.longest, cpu::parallel_block);
  if (plan.operation == Operation::forward) return {.square_qk = squares, .square_hv = squares};
  return {.square_qk = 4 * squares, .square_hv = 3 * squares};
}

// As src/cpu/formulations/chunkwise_*.cc go through tiles, chunks and spans.
Work chunkwise_on_cpu(const Plan& plan) {
  const std::int64_t tokens = plan.shape.longest;
  const bool backward = plan.operation == Operation::backward;
  const Cut sequence = cut(tokens, plan.chunk, plan.tile);
  Work work{.square_qk = backward ? 3 * sequence.squares : own_scores(plan) * sequence.squares,
            .square_hv = (backward ? 2 : 1) * sequence.squares};
  const std::int64_t spans = (tokens + plan.span - 1) / plan.span;
  if (spans > 1) {
    // The pass that makes spans independent: states before, and state gradients after, all spans but one.
    work.state += static_cast<double>((spans - 1) * plan.span);
    if (backward) work.state += static_cast<double>(tokens - plan.span);
  }
  for (std::int64_t begin = 0; begin < tokens; begin += plan.span) {
    const std::int64_t length = std::min(plan.span, tokens - begin);
    const Cut span = cut(length, plan.chunk, plan.tile);
    const double meets_state = span.tokens - (begin == 0 ? span.first : 0);
    if (!backward) {
      work.state += meets_state + span.tokens - span.last;
      continue;
    }
    const double meets_gradient = span.tokens - (begin + length == tokens ? span.last : 0);
    const std::int64_t chunks = (length + plan.chunk - 1) / plan.chunk;
    const double stored = static_cast<double>((chunks - 1) * plan.chunk);
    const Cut chunk = cut(std::min(plan.chunk, length), plan.chunk, plan.tile);
    const double rebuilt =
        static_cast<double>(chunks - 1) * (chunk.tokens - chunk.last) + (span.tokens - stored - span.last);
    work.state += meets_state + 2 * meets_gradient + (span.tokens - span.first) + stored + rebuilt;
  }
  return work;
}

// By chunks, walked through in blocks of a tile; blocks above the diagonal are left out.
Work chunkwise_on_gpu(const Plan& plan) {
  const bool backward = plan.operation == Operation::backward;
  const std::int64_t tokens = plan.shape.longest;
  const double squares = static_cast<double>(tokens / plan.chunk) * causal_blocks(plan.chunk, plan.tile) +
                         causal_blocks(tokens % plan.chunk, plan.tile);
  Work work{.square_qk = (backward ? 3 : 1) * squares, .square_hv = (backward ? 2 : 1) * squares};
  if (plan.formulation == Formulation::chunkwise)
    work.state = state_tokens(backward, cut(tokens, plan.chunk, plan.chunk));
  return work;
}

Work executed(const Plan& plan) {
  if (plan.formulation == Formulation::recurrent) return useful(plan);
  if (plan.device == Device::cuda) return chunkwise_on_gpu(plan);
  return plan.formulation == Formulation::parallel ? parallel_on_cpu(plan) : chunkwise_on_cpu(plan);
}

}  // namespace

double tensor_bytes(Operation operation, const MlstmShape& shape) {
  const double tokens = static_cast<double>(shape.batch) * static_cast<double>(shape.tokens);
  const double qk = static_cast<double>(shape.qk_heads) * static_cast<double>(shape.dqk);
  const double hv = static_cast<double>(shape.heads) * static_cast<double>(shape.dhv);
  const double gates = 2.0 * static_cast<double>(shape.heads);
  const double item = static_cast<double>(item_size(shape.dtype));
  const double gate_item = static_cast<double>(item_size(shape.gate_dtype));
  if (operation == Operation::backward) return tokens * ((4 * qk + 3 * hv) * item + 2 * gates * gate_item);
  return tokens * ((2 * qk + 2 * hv) * item + gates * gate_item);
}

Cost cost(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  Cost result{.bytes = tensor_bytes(plan.operation, shape)};
  if (plan.operation == Operation::step) {
    const double item = plan.compute == DType::float64 ? 8 : 4;
    result.bytes += 2 * static_cast<double>(shape.batch) * static_cast<double>(shape.heads) *
                    static_cast<double>(shape.dqk) * static_cast<double>(shape.dhv + 1) * item;
  }
  if (shape.longest == 0 || shape.tokens == 0 || shape.batch == 0) return result;
  const double sequences =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) / static_cast<double>(shape.longest);
  const double units = sequences * static_cast<double>(shape.heads);
  result.flops = units * executed(plan).flops(shape);
  result.useful_flops = units * useful(plan).flops(shape);
  return result;
}

}  // namespace tfla
