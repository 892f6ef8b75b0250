// The convolution on the CPU: arguments that are valid and planned, and the passes that run on them.
#include "cpu/conv/passes.h"
#include "cpu/with_real.h"
#include "plan/operators/conv_backend.h"

namespace tfla::cpu::conv {

namespace {

template <class Args, class Pass>
void run(const Args& args, const ConvPlan& plan, std::byte* memory, const Pass& pass) {
  with_real(plan, [&](auto real) {
    Arena arena(memory);
    pass(args, plan, Scratch<decltype(real)>(arena, plan));
  });
}

void forward(const ConvForward& args, const ConvPlan& plan, std::byte* scratch, void* /*stream*/) {
  run(args, plan, scratch, [](const auto&... all) { run_forward(all...); });
}
void backward(const ConvBackward& args, const ConvPlan& plan, std::byte* scratch, void* /*stream*/) {
  run(args, plan, scratch, [](const auto&... all) { run_backward(all...); });
}
void step(const ConvStep& args, const ConvPlan& plan, std::byte* scratch, void* /*stream*/) {
  run(args, plan, scratch, [](const auto&... all) { run_step(all...); });
}

}  // namespace

}  // namespace tfla::cpu::conv

namespace tfla {

const ConvBackend& cpu_conv_backend() {
  static constexpr ConvBackend backend{
      .forward = cpu::conv::forward, .backward = cpu::conv::backward, .step = cpu::conv::step};
  return backend;
}

std::size_t cpu_scratch_bytes(const ConvPlan& plan) {
  Arena arena;
  cpu::with_real(plan, [&](auto real) { (void)cpu::conv::Scratch<decltype(real)>(arena, plan); });
  return arena.used();
}

}  // namespace tfla
