// The delta rule: plans and calls.
#include "api/scratch.h"
#include "api/validate.h"
#include "api/validate_delta.h"
#include "core/checks.h"
#include "plan/delta_backend.h"
#include "plan/delta_plan.h"
#include "tfla/error.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

// Throws Unavailable where the build has no such backend.
const DeltaBackend& delta_backend(Device device) {
  if (device == Device::cpu) return cpu_delta_backend();
  backend(device).check_available();
  return *cuda_delta_backend();
}

template <class Args>
DeltaPlan plan_of(Operation operation, const Args& args, const Execution& execution) {
  check_device(execution);
  return make_delta_plan(operation, validate(args, execution.device), args.options, execution);
}

template <class Args>
void check_call(const DeltaPlan& plan, Operation operation, const Args& args, std::span<std::byte> scratch) {
  const DeltaShape shape = validate(args, plan.device);
  if (plan.operation != operation || plan.shape != shape || plan.options != args.options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  check_scratch(plan.scratch_bytes, scratch);
}

}  // namespace

DeltaPlan delta_plan(Operation operation, const DeltaShape& shape, const DeltaOptions& options,
                     const Execution& execution) {
  check_device(execution);
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
  cpu_delta_backend().forward(args, plan, scratch.data(), stream);
}
void delta_backward(const DeltaBackward& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::backward, args, scratch);
  cpu_delta_backend().backward(args, plan, scratch.data(), stream);
}
void delta_step(const DeltaStep& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::step, args, scratch);
  cpu_delta_backend().step(args, plan, scratch.data(), stream);
}

void delta_forward(const DeltaForward& args, const Execution& execution) {
  const DeltaPlan plan = delta_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, execution.stream);
  cpu_delta_backend().forward(args, plan, scratch.data(), execution.stream);
}
void delta_backward(const DeltaBackward& args, const Execution& execution) {
  const DeltaPlan plan = delta_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, execution.stream);
  cpu_delta_backend().backward(args, plan, scratch.data(), execution.stream);
}
void delta_step(const DeltaStep& args, const Execution& execution) {
  const DeltaPlan plan = delta_plan(args, execution);
  const OwnScratch scratch(plan.device, plan.scratch_bytes, execution.stream);
  cpu_delta_backend().step(args, plan, scratch.data(), execution.stream);
}

}  // namespace tfla
