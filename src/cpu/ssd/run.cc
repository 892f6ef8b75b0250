// The state space dual on the CPU: arguments that are valid and planned become a Problem of the mLSTM, whose chunkwise
// passes run on it, with gates of a time step and an epilogue.
#include "cpu/formulations/chunkwise_backward.h"
#include "cpu/formulations/chunkwise_forward.h"
#include "cpu/padding.h"
#include "cpu/ssd/step.h"
#include "cpu/stages/epilogue.h"
#include "cpu/stages/time_step.h"
#include "cpu/with_real.h"
#include "plan/operators/ssd_backend.h"

namespace tfla::cpu::ssd {

namespace {

// What backward needs besides the scratch of the scan's.
template <class Real>
struct GradientScratch {
  BackwardScratch<Real> scan;
  EpilogueScratch<Real> epilogue;
  double* A_terms;     // [H,tokens]
  double* bias_terms;  // [H,tokens]

  GradientScratch(Arena& arena, const Plan& plan) : scan(arena, plan), epilogue(arena, plan) {
    const std::int64_t count = plan.shape.batch * plan.shape.tokens * plan.shape.heads;
    A_terms = arena.take<double>(count);
    bias_terms = arena.take<double>(count);
  }
};

template <class Real>
std::size_t count_scratch(const SsdPlan& plan) {
  Arena arena;
  switch (plan.operation) {
    case Operation::forward: (void)ForwardScratch<Real>(arena, plan.scan); break;
    case Operation::backward: (void)GradientScratch<Real>(arena, plan.scan); break;
    case Operation::step: (void)StepScratch<Real>(arena, plan); break;
  }
  return arena.used();
}

template <class Args>
TimeStep time_step_of(const Args& args) {
  return {.A = args.A,
          .bias = args.dt_bias,
          .seq_idx = args.seq_idx,
          .softplus = args.options.dt_softplus,
          .least = args.options.dt_min,
          .most = args.options.dt_max};
}

// States are [N,H,P,S] here, and [N,H,dqk,dhv] there.
template <class View>
View turned(const View& state) {
  return state.given() ? state.transposed(2, 3) : state;
}

template <class Args>
Problem problem_of(const Args& args, const Plan& plan, const TimeStep& time_step) {
  return {.plan = plan,
          .settings = resolve(plan.options, plan.shape.dqk),
          .q = args.C,
          .k = args.B,
          .v = args.x,
          .i = args.dt,
          .f = {},
          .initial_state = {.C = turned(args.initial_state), .n = {}, .m = {}},
          .cu_seqlens = args.cu_seqlens,
          .time_step = &time_step,
          .epilogue = {.D = args.D, .z = args.z, .ungated = args.ungated}};
}

void forward(const SsdForward& args, const SsdPlan& plan, std::byte* scratch, void* /*stream*/) {
  clear_padding(args.cu_seqlens, {args.y});
  if (args.ungated.given()) clear_padding(args.cu_seqlens, {args.ungated});
  with_real(plan.scan, [&](auto real) {
    Arena arena(scratch);
    const TimeStep time_step = time_step_of(args);
    const ForwardOutputs outputs{
        .h = args.y, .last_state = {.C = turned(args.last_state), .n = {}, .m = {}}, .ungated = args.ungated};
    run_forward(problem_of(args, plan.scan, time_step), outputs, ForwardScratch<decltype(real)>(arena, plan.scan));
  });
}

void backward(const SsdBackward& args, const SsdPlan& plan, std::byte* scratch, void* /*stream*/) {
  clear_padding(args.cu_seqlens, {args.dx, args.ddt, args.dB, args.dC});
  if (args.dz.given()) clear_padding(args.cu_seqlens, {args.dz});
  const BackwardTensors tensors{.dh = args.dy,
                                .dlast_state = {.C = turned(args.dlast_state), .n = {}},
                                .dq = args.dC,
                                .dk = args.dB,
                                .dv = args.dx,
                                .di = args.ddt,
                                .df = {},
                                .dinitial_state = {.C = turned(args.dinitial_state), .n = {}}};
  with_real(plan.scan, [&](auto real) {
    Arena arena(scratch);
    const GradientScratch<decltype(real)> memory(arena, plan.scan);
    TimeStep time_step = time_step_of(args);
    time_step.A_terms = memory.A_terms;
    time_step.bias_terms = memory.bias_terms;
    const Problem problem = problem_of(args, plan.scan, time_step);
    run_backward(problem, tensors, memory.scan);
    sum_time_step_gradients(problem, args.dA, args.ddt_bias);
    epilogue_gradients(problem, args.dy, args.dz, args.dD, memory.epilogue);
  });
}

void step(const SsdStep& args, const SsdPlan& plan, std::byte* scratch, void* /*stream*/) {
  with_real(plan.scan, [&](auto real) {
    Arena arena(scratch);
    run_step(args, plan, StepScratch<decltype(real)>(arena, plan));
  });
}

}  // namespace

}  // namespace tfla::cpu::ssd

namespace tfla {

const SsdBackend& cpu_ssd_backend() {
  static constexpr SsdBackend backend{
      .forward = cpu::ssd::forward, .backward = cpu::ssd::backward, .step = cpu::ssd::step};
  return backend;
}

std::size_t cpu_scratch_bytes(const SsdPlan& plan) {
  std::size_t bytes = 0;
  cpu::with_real(plan.scan, [&](auto real) { bytes = cpu::ssd::count_scratch<decltype(real)>(plan); });
  return bytes;
}

}  // namespace tfla
