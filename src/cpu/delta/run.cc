// The delta rule on the CPU: arguments that are valid and planned become a Problem, and the plan's pass runs on it.
#include "cpu/delta/backward.h"
#include "cpu/delta/forward.h"
#include "cpu/delta/step.h"
#include "cpu/padding.h"
#include "cpu/with_real.h"
#include "plan/operators/delta_backend.h"

namespace tfla::cpu::delta {

namespace {

template <class Args>
Problem problem_of(const Args& args, const DeltaPlan& plan) {
  Problem problem{.plan = plan,
                  .q = args.q,
                  .k = args.k,
                  .v = args.v,
                  .beta = args.beta,
                  .g = args.g,
                  .A_log = args.A_log,
                  .dt_bias = args.dt_bias};
  if constexpr (requires { args.initial_state; }) {
    problem.initial_state = args.initial_state;
    problem.cu_seqlens = args.cu_seqlens;
  }
  return problem;
}

template <class Real>
std::size_t count_scratch(const DeltaPlan& plan) {
  Arena arena;
  switch (plan.operation) {
    case Operation::forward: (void)ForwardScratch<Real>(arena, plan); break;
    case Operation::backward: (void)BackwardScratch<Real>(arena, plan); break;
    case Operation::step: (void)StepScratch<Real>(arena, plan); break;
  }
  return arena.used();
}

void forward(const DeltaForward& args, const DeltaPlan& plan, std::byte* scratch, void* /*stream*/) {
  clear_padding(args.cu_seqlens, {args.h});
  with_real(plan, [&](auto real) {
    Arena arena(scratch);
    run_forward(problem_of(args, plan), args.h, args.last_state, ForwardScratch<decltype(real)>(arena, plan));
  });
}

void backward(const DeltaBackward& args, const DeltaPlan& plan, std::byte* scratch, void* /*stream*/) {
  const BackwardTensors tensors{.dh = args.dh,
                                .dlast_state = args.dlast_state,
                                .dq = args.dq,
                                .dk = args.dk,
                                .dv = args.dv,
                                .dbeta = args.dbeta,
                                .dg = args.dg,
                                .dA_log = args.dA_log,
                                .ddt_bias = args.ddt_bias,
                                .dinitial_state = args.dinitial_state};
  clear_padding(args.cu_seqlens, {args.dq, args.dk, args.dv, args.dbeta});
  if (args.dg.given()) clear_padding(args.cu_seqlens, {args.dg});
  with_real(plan, [&](auto real) {
    Arena arena(scratch);
    run_backward(problem_of(args, plan), tensors, BackwardScratch<decltype(real)>(arena, plan));
  });
}

void step(const DeltaStep& args, const DeltaPlan& plan, std::byte* scratch, void* /*stream*/) {
  with_real(plan, [&](auto real) {
    Arena arena(scratch);
    run_step(problem_of(args, plan), args.h, args.state, args.slots, StepScratch<decltype(real)>(arena, plan));
  });
}

}  // namespace

}  // namespace tfla::cpu::delta

namespace tfla {

const DeltaBackend& cpu_delta_backend() {
  static constexpr DeltaBackend backend{
      .forward = cpu::delta::forward, .backward = cpu::delta::backward, .step = cpu::delta::step};
  return backend;
}

std::size_t cpu_scratch_bytes(const DeltaPlan& plan) {
  std::size_t bytes = 0;
  cpu::with_real(plan, [&](auto real) { bytes = cpu::delta::count_scratch<decltype(real)>(plan); });
  return bytes;
}

}  // namespace tfla
