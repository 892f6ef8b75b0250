// The state space dual: plans and calls.
#include "api/scratch.h"
#include "api/validate.h"
#include "api/validate_ssd.h"
#include "core/checks.h"
#include "plan/ssd_backend.h"
#include "plan/ssd_plan.h"
#include "tfla/error.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

void check_execution(const Execution& execution) {
  if (execution.device == Device::cuda) {
    throw Unavailable("tfla: the state space dual has no CUDA kernels yet; use the device cpu");
  }
  validate_execution(execution);
}

template <class Args>
SsdPlan plan_of(Operation operation, const Args& args, const Execution& execution) {
  check_execution(execution);
  return make_ssd_plan(operation, validate(args, execution.device), args.options, execution);
}

template <class Args>
void check_call(const SsdPlan& plan, Operation operation, const Args& args, std::span<std::byte> scratch) {
  const MlstmShape shape = validate(args, plan.scan.device);
  if (plan.operation != operation || plan.scan.shape != shape || plan.options != args.options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  check_scratch(plan.scratch_bytes, scratch);
}

// Calls run(args, plan, memory, stream) with scratch of its own.
template <class Args>
void plan_and_run(const Args& args, const Execution& execution,
                  void (*run)(const Args&, const SsdPlan&, std::byte*, void*)) {
  const SsdPlan plan = ssd_plan(args, execution);
  const OwnScratch scratch(plan.scan.device, plan.scratch_bytes, execution.stream);
  run(args, plan, scratch.data(), execution.stream);
}

}  // namespace

SsdPlan ssd_plan(Operation operation, const MlstmShape& shape, const SsdOptions& options, const Execution& execution) {
  check_execution(execution);
  validate_options(options, operation);
  validate_shape(shape);
  return make_ssd_plan(operation, shape, options, execution);
}
SsdPlan ssd_plan(const SsdForward& args, const Execution& execution) {
  return plan_of(Operation::forward, args, execution);
}
SsdPlan ssd_plan(const SsdBackward& args, const Execution& execution) {
  return plan_of(Operation::backward, args, execution);
}
SsdPlan ssd_plan(const SsdStep& args, const Execution& execution) { return plan_of(Operation::step, args, execution); }

void ssd_forward(const SsdForward& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::forward, args, scratch);
  cpu_ssd_backend().forward(args, plan, scratch.data(), stream);
}
void ssd_backward(const SsdBackward& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::backward, args, scratch);
  cpu_ssd_backend().backward(args, plan, scratch.data(), stream);
}
void ssd_step(const SsdStep& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::step, args, scratch);
  cpu_ssd_backend().step(args, plan, scratch.data(), stream);
}

void ssd_forward(const SsdForward& args, const Execution& execution) {
  plan_and_run(args, execution, cpu_ssd_backend().forward);
}
void ssd_backward(const SsdBackward& args, const Execution& execution) {
  plan_and_run(args, execution, cpu_ssd_backend().backward);
}
void ssd_step(const SsdStep& args, const Execution& execution) {
  plan_and_run(args, execution, cpu_ssd_backend().step);
}

}  // namespace tfla
