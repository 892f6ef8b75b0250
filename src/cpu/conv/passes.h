// The passes of the convolution on the CPU.
#pragma once

#include "core/arena.h"
#include "cpu/conv/tile.h"
#include "cpu/workers.h"
#include "tfla/conv.h"

namespace tfla::cpu::conv {

template <class Real>
struct Scratch {
  Workers<Worker<Real>> workers;
  double* sums = nullptr;  // backward: [spans,W+1,D], the gradients of weights and bias of every span

  Scratch(Arena& arena, const ConvPlan& plan) : workers(arena, plan) {
    if (plan.operation == Operation::backward)
      sums = arena.take<double>(plan.spans() * (plan.shape.width + 1) * plan.shape.channels);
  }
};

[[nodiscard]] inline Panel panel_of(const ConvPlan& plan, std::int64_t number) {
  const std::int64_t first = number * plan.panel;
  return {first, std::min(plan.panel, plan.shape.channels - first)};
}

template <class Real>
void run_forward(const ConvForward& args, const ConvPlan& plan, const Scratch<Real>& scratch);
template <class Real>
void run_backward(const ConvBackward& args, const ConvPlan& plan, const Scratch<Real>& scratch);
template <class Real>
void run_step(const ConvStep& args, const ConvPlan& plan, const Scratch<Real>& scratch);

}  // namespace tfla::cpu::conv
