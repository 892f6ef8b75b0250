// What the plan and the CUDA backend of the convolution both know: the kernels, who takes which tokens, and how scratch
// is laid out.
#pragma once

#include <cstdint>

#include "core/arena.h"
#include "plan/arithmetic.h"
#include "tfla/conv.h"

namespace tfla {

// Launches of a plan for CUDA.
enum class ConvKernel : std::uint8_t {
  forward,
  last_state,     // the last inputs of every sequence
  gradients,      // dx, and sums for dweight and dbias over spans of tokens
  initial_state,  // the gradient of the initial state
  sum_spans,      // dweight and dbias from these sums
  step
};
[[nodiscard]] const char* name(ConvKernel kernel);

// Kernels hold so many weights of a channel in registers, and what they meet: few of several channels, or as many as
// there may be of one.
inline constexpr std::int64_t conv_few_taps = 4;

// Neighbouring threads that share a span. Lanes of a warp are neighbours in memory: where tokens lie side by side they
// have tokens, else channels.
[[nodiscard]] constexpr int conv_lanes(const ConvShape& shape) { return shape.along_tokens ? 32 : 1; }

// Scratch of a call. Real: float, or double for float64 tensors.
template <class Real>
struct ConvScratch {
  Real* sums = nullptr;  // backward: [spans,W+1,D], by the distance of the input, then of the bias

  ConvScratch() = default;
  ConvScratch(Arena& arena, const ConvPlan& plan) {
    if (plan.operation == Operation::backward)
      sums = arena.take<Real>(plan.spans() * (plan.shape.width + 1) * plan.shape.channels);
  }
};

}  // namespace tfla
