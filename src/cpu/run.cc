// The CPU backend: arguments that are valid and planned become a Problem, and the plan's pass runs on it.
#include <omp.h>

#include <new>

#include "core/huge_pages.h"
#include "cpu/formulations/chunkwise_backward.h"
#include "cpu/formulations/chunkwise_forward.h"
#include "cpu/formulations/parallel.h"
#include "cpu/formulations/recurrent.h"
#include "cpu/padding.h"
#include "cpu/with_real.h"
#include "plan/backend.h"

namespace tfla::cpu {

namespace {

template <class Args>
Problem problem_of(const Args& args, const Plan& plan) {
  return {.plan = plan,
          .settings = resolve(args.options, plan.shape.dqk),
          .q = args.q,
          .k = args.k,
          .v = args.v,
          .i = args.i,
          .f = args.f,
          .initial_state = {},
          .cu_seqlens = {}};
}

template <class Args>
Problem sequence_problem(const Args& args, const Plan& plan) {
  Problem problem = problem_of(args, plan);
  problem.initial_state = args.initial_state;
  problem.cu_seqlens = args.cu_seqlens;
  return problem;
}

template <class Real>
std::size_t count_scratch(const Plan& plan) {
  Arena arena;
  if (plan.operation == Operation::step || plan.formulation == Formulation::recurrent) {
    const StepScratch<Real> scratch(arena, plan);
  } else if (plan.formulation == Formulation::parallel) {
    const ParallelScratch<Real> scratch(arena, plan);
  } else if (plan.operation == Operation::forward) {
    const ForwardScratch<Real> scratch(arena, plan);
  } else {
    const BackwardScratch<Real> scratch(arena, plan);
  }
  return arena.used();
}

[[nodiscard]] Pass pass_of(const Plan& plan) { return static_cast<Pass>(plan.launches[0].kernel); }

void forward(const MlstmForward& args, const Plan& plan, std::byte* scratch, void* /*stream*/) {
  const Problem problem = sequence_problem(args, plan);
  const ForwardOutputs outputs{.h = args.h, .last_state = args.last_state};
  clear_padding(args.cu_seqlens, {args.h});
  with_real(plan, [&](auto real) {
    using Real = decltype(real);
    Arena arena(scratch);
    switch (pass_of(plan)) {
      case Pass::forward_parallel: run_parallel_forward(problem, outputs, ParallelScratch<Real>(arena, plan)); break;
      case Pass::forward_recurrent: run_recurrent(problem, outputs, StepScratch<Real>(arena, plan)); break;
      default: run_forward(problem, outputs, ForwardScratch<Real>(arena, plan)); break;
    }
  });
}

void backward(const MlstmBackward& args, const Plan& plan, std::byte* scratch, void* /*stream*/) {
  const Problem problem = sequence_problem(args, plan);
  const BackwardTensors tensors{.dh = args.dh,
                                .dlast_state = args.dlast_state,
                                .dq = args.dq,
                                .dk = args.dk,
                                .dv = args.dv,
                                .di = args.di,
                                .df = args.df,
                                .dinitial_state = args.dinitial_state};
  clear_padding(args.cu_seqlens, {args.dq, args.dk, args.dv, args.di, args.df});
  with_real(plan, [&](auto real) {
    using Real = decltype(real);
    Arena arena(scratch);
    if (pass_of(plan) == Pass::backward_parallel) {
      run_parallel_backward(problem, tensors, ParallelScratch<Real>(arena, plan));
    } else {
      run_backward(problem, tensors, BackwardScratch<Real>(arena, plan));
    }
  });
}

void step(const MlstmStep& args, const Plan& plan, std::byte* scratch, void* /*stream*/) {
  const Problem problem = problem_of(args, plan);
  with_real(plan, [&](auto real) {
    Arena arena(scratch);
    run_step(problem, args.h, args.state, args.slots, StepScratch<decltype(real)>(arena, plan));
  });
}

std::byte* allocate(std::size_t bytes, void* /*stream*/) {
  auto* memory = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{scratch_alignment}));
  ask_for_huge_pages(memory, bytes);
  return memory;
}

void release(std::byte* memory, void* /*stream*/) { ::operator delete (memory, std::align_val_t{scratch_alignment}); }

}  // namespace

}  // namespace tfla::cpu

namespace tfla {

const Backend& cpu_backend() {
  static constexpr Backend backend{.check_available = [] {},
                                   .facts = [] { return DeviceFacts{}; },
                                   .forward = cpu::forward,
                                   .backward = cpu::backward,
                                   .step = cpu::step,
                                   .allocate = cpu::allocate,
                                   .release = cpu::release,
                                   .instruments = nullptr};
  return backend;
}

int cpu_threads() { return omp_get_max_threads(); }

std::size_t cpu_scratch_bytes(const Plan& plan) {
  std::size_t bytes = 0;
  cpu::with_real(plan, [&](auto real) { bytes = cpu::count_scratch<decltype(real)>(plan); });
  return bytes;
}

}  // namespace tfla
