// The delta rule: plans and calls.
#include <utility>

#include "api/scratch.h"
#include "api/validate.h"
#include "api/validate_delta.h"
#include "core/checks.h"
#include "plan/operators/delta_backend.h"
#include "plan/operators/delta_cuda.h"
#include "plan/operators/delta_plan.h"
#include "tfla/error.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

// Throws Unavailable where the build has no such backend.
const DeltaBackend& delta_backend(Device device) {
  (void)backend(device);
  return device == Device::cpu ? cpu_delta_backend() : *cuda_delta_backend();
}

void check_current_gpu(const Execution& execution) {
  if (execution.gpu) refuse("tfla: execution.gpu is given; it is for plans, and a call runs on the current GPU");
}

template <class Args>
DeltaPlan plan_of(Operation operation, const Args& args, const Execution& execution) {
  validate_untested(execution, "the delta rule");
  return make_delta_plan(operation, validate(args, execution.device), args.options, execution);
}

template <class Args>
void check_call(const DeltaPlan& plan, Operation operation, const Args& args, std::span<std::byte> scratch) {
  DeltaShape shape = validate(args, plan.device);
  const bool aligned = std::exchange(shape.aligned, plan.shape.aligned);  // not all kernels ask for it
  if (plan.operation != operation || plan.shape != shape || plan.options != args.options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  if (!aligned && plan.device == Device::cuda && launches(plan, DeltaKernel::solve)) {
    refuse("tfla: plan was made for tensors whose rows begin on 16 bytes; plan these arguments");
  }
  check_scratch(plan.scratch_bytes, scratch);
}

}  // namespace

DeltaPlan delta_plan(Operation operation, const DeltaShape& shape, const DeltaOptions& options,
                     const Execution& execution) {
  validate_untested(execution, "the delta rule");
  validate_options(options, operation);
  validate_shape(shape);
  return make_delta_plan(operation, shape, options, execution);
}

DeltaPlan delta_plan(const DeltaForward& args, const Execution& execution) {
  return plan_of(Operation::forward, args, execution);
}
DeltaPlan delta_plan(const DeltaBackward& args, const Execution& execution) {
  return plan_of(Operation::backward, args, execution);
}
DeltaPlan delta_plan(const DeltaStep& args, const Execution& execution) {
  return plan_of(Operation::step, args, execution);
}

void delta_forward(const DeltaForward& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::forward, args, scratch);
  delta_backend(plan.device).forward(args, plan, scratch.data(), stream);
}
void delta_backward(const DeltaBackward& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::backward, args, scratch);
  delta_backend(plan.device).backward(args, plan, scratch.data(), stream);
}
void delta_step(const DeltaStep& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::step, args, scratch);
  delta_backend(plan.device).step(args, plan, scratch.data(), stream);
}

void delta_forward(const DeltaForward& args, const Execution& execution) {
  check_current_gpu(execution);
  const DeltaPlan plan = delta_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, execution.stream);
  delta_backend(plan.device).forward(args, plan, scratch.data(), execution.stream);
}
void delta_backward(const DeltaBackward& args, const Execution& execution) {
  check_current_gpu(execution);
  const DeltaPlan plan = delta_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, execution.stream);
  delta_backend(plan.device).backward(args, plan, scratch.data(), execution.stream);
}
void delta_step(const DeltaStep& args, const Execution& execution) {
  check_current_gpu(execution);
  const DeltaPlan plan = delta_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, execution.stream);
  delta_backend(plan.device).step(args, plan, scratch.data(), execution.stream);
}

}  // namespace tfla
