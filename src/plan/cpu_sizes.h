// Sizes that the CPU backend and the plan agree on.
#pragma once

#include <cstdint>

#include "tfla/plan.h"

namespace tfla::cpu {

// Columns of a state that a thread takes at a time where several share one. Products with the state are the same
// arithmetic element by element, whoever computes how much of it (cpu/kernels/product.h).
inline constexpr std::int64_t state_panel = 128;
[[nodiscard]] inline std::int64_t panels(const Plan& plan) { return (plan.shape.dhv + state_panel - 1) / state_panel; }

// Rows a power of two apart share few sets of the first-level cache, so those that products read again and again get a
// cache line of floats more than they fill.
[[nodiscard]] constexpr std::int64_t padded(std::int64_t cols) { return cols + 16; }

// Numbers of a whole state.
[[nodiscard]] inline std::int64_t state_size(const MlstmShape& shape) { return shape.dqk * (padded(shape.dhv) + 1); }

// Heads that a thread may carry through the tokens at the same time.
inline constexpr std::int64_t most_abreast = 4;

// Tokens of a square of the parallel formulation. 64: the smallest at which the products run at full speed.
inline constexpr std::int64_t parallel_block = 64;

// Passes over a call's tokens; plan.launches has one of them.
enum class Pass : std::uint8_t {
  forward_fused,     // gates, then states and outputs of a sequence by one thread
  forward_by_spans,  // gates, states at the starts of spans, outputs
  forward_parallel,
  forward_recurrent,
  backward_fused,
  backward_by_spans,
  backward_parallel,
  step,
};

}  // namespace tfla::cpu
