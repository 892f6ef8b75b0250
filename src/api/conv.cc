// The causal convolution: plans and calls.
#include <type_traits>

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

// Throws Unavailable where the build has no such backend.
const ConvBackend& conv_backend(Device device) {
  (void)backend(device);
  return device == Device::cpu ? cpu_conv_backend() : *cuda_conv_backend();
}

template <class Args>
ConvGiven given_in(const Args& args) {
  ConvGiven given;
  if constexpr (std::is_same_v<Args, ConvForward>) given.last_state = args.last_state.given();
  if constexpr (std::is_same_v<Args, ConvBackward>) given.dinitial_state = args.dinitial_state.given();
  return given;
}

template <class Args>
ConvPlan plan_of(Operation operation, const Args& args, const Execution& execution) {
  validate_untested(execution, "the convolution");
  return make_conv_plan(operation, validate(args, execution.device), args.options, given_in(args), execution);
}

template <class Args>
void check_call(const ConvPlan& plan, Operation operation, const Args& args, std::span<std::byte> scratch) {
  ConvShape shape = validate(args, plan.device);
  if (plan.panel == 1) shape.aligned = plan.shape.aligned;  // serves rows anywhere
  if (plan.operation != operation || plan.shape != shape || plan.options != args.options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  if (plan.device == Device::cuda && plan.given != given_in(args)) {
    refuse("tfla: plan was made for a call with other optional tensors; plan these arguments again");
  }
  check_scratch(plan.scratch_bytes, scratch);
}

// Calls backend.*run with scratch of its own.
template <class Args>
void plan_and_run(const Args& args, const Execution& execution,
                  void (*ConvBackend::*run)(const Args&, const ConvPlan&, std::byte*, void*)) {
  if (execution.gpu) refuse("tfla: execution.gpu is given; it is for plans, and a call runs on the current GPU");
  const ConvPlan plan = conv_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, execution.stream);
  (conv_backend(plan.device).*run)(args, plan, scratch.data(), execution.stream);
}

}  // namespace

ConvPlan conv_plan(Operation operation, const ConvShape& shape, const ConvOptions& options,
                   const Execution& execution) {
  validate_untested(execution, "the convolution");
  validate_options(options, operation);
  validate_shape(shape);
  return make_conv_plan(operation, shape, options, {}, execution);
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

void conv_forward(const ConvForward& args, const ConvPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::forward, args, scratch);
  conv_backend(plan.device).forward(args, plan, scratch.data(), stream);
}
void conv_backward(const ConvBackward& args, const ConvPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::backward, args, scratch);
  conv_backend(plan.device).backward(args, plan, scratch.data(), stream);
}
void conv_step(const ConvStep& args, const ConvPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::step, args, scratch);
  conv_backend(plan.device).step(args, plan, scratch.data(), stream);
}

void conv_forward(const ConvForward& args, const Execution& execution) {
  plan_and_run(args, execution, &ConvBackend::forward);
}
void conv_backward(const ConvBackward& args, const Execution& execution) {
  plan_and_run(args, execution, &ConvBackend::backward);
}
void conv_step(const ConvStep& args, const Execution& execution) { plan_and_run(args, execution, &ConvBackend::step); }

}  // namespace tfla
