// The causal convolution: plans and calls.
#include "api/scratch.h"
#include "api/validate.h"
#include "api/validate_conv.h"
#include "core/checks.h"
#include "plan/operators/conv_backend.h"
#include "plan/operators/conv_plan.h"
#include "tfla/error.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

void check_device(const Execution& execution) {
  if (execution.device == Device::cuda) {
    throw Unavailable("tfla: the convolution has no CUDA kernels yet; use the device cpu");
  }
  validate_execution(execution);
}

template <class Args>
ConvPlan plan_of(Operation operation, const Args& args, const Execution& execution) {
  check_device(execution);
  return make_conv_plan(operation, validate(args, execution.device), args.options, execution);
}

template <class Args>
void check_call(const ConvPlan& plan, Operation operation, const Args& args, std::span<std::byte> scratch) {
  const ConvShape shape = validate(args, plan.device);
  if (plan.operation != operation || plan.shape != shape || plan.options != args.options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  check_scratch(plan.scratch_bytes, scratch);
}

}  // namespace

ConvPlan conv_plan(Operation operation, const ConvShape& shape, const ConvOptions& options,
                   const Execution& execution) {
  check_device(execution);
  validate_options(options, operation);
  validate_shape(shape);
  return make_conv_plan(operation, shape, options, execution);
}

ConvPlan conv_plan(const ConvForward& args, const Execution& execution) {
  return plan_of(Operation::forward, args, execution);
}
ConvPlan conv_plan(const ConvBackward& args, const Execution& execution) {
  return plan_of(Operation::backward, args, execution);
}
ConvPlan conv_plan(const ConvStep& args, const Execution& execution) {
  return plan_of(Operation::step, args, execution);
}

void conv_forward(const ConvForward& args, const ConvPlan& plan, std::span<std::byte> scratch, void* /*stream*/) {
  check_call(plan, Operation::forward, args, scratch);
  cpu_conv_backend().forward(args, plan, scratch.data());
}
void conv_backward(const ConvBackward& args, const ConvPlan& plan, std::span<std::byte> scratch, void* /*stream*/) {
  check_call(plan, Operation::backward, args, scratch);
  cpu_conv_backend().backward(args, plan, scratch.data());
}
void conv_step(const ConvStep& args, const ConvPlan& plan, std::span<std::byte> scratch, void* /*stream*/) {
  check_call(plan, Operation::step, args, scratch);
  cpu_conv_backend().step(args, plan, scratch.data());
}

void conv_forward(const ConvForward& args, const Execution& execution) {
  const ConvPlan plan = conv_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, nullptr);
  cpu_conv_backend().forward(args, plan, scratch.data());
}
void conv_backward(const ConvBackward& args, const Execution& execution) {
  const ConvPlan plan = conv_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, nullptr);
  cpu_conv_backend().backward(args, plan, scratch.data());
}
void conv_step(const ConvStep& args, const Execution& execution) {
  const ConvPlan plan = conv_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, nullptr);
  cpu_conv_backend().step(args, plan, scratch.data());
}

}  // namespace tfla
