// The state space dual: plans and calls.
#include <type_traits>
#include <utility>

#include "api/scratch.h"
#include "api/validate.h"
#include "api/validate_ssd.h"
#include "core/checks.h"
#include "plan/cuda_plan.h"
#include "plan/operators/ssd_backend.h"
#include "plan/operators/ssd_plan.h"
#include "tfla/error.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

// Throws Unavailable where the build has no such backend.
const SsdBackend& ssd_backend(Device device) {
  (void)backend(device);
  return device == Device::cpu ? cpu_ssd_backend() : *cuda_ssd_backend();
}

template <class Args>
SsdGiven given_in(const Args& args) {
  SsdGiven given{.D = args.D.given(), .z = args.z.given()};
  if constexpr (!std::is_same_v<Args, SsdStep>) given.initial_state = args.initial_state.given();
  if constexpr (std::is_same_v<Args, SsdForward>) {
    given.last_state = args.last_state.given();
    given.aligned = has_aligned_epilogue(args);
  }
  if constexpr (std::is_same_v<Args, SsdBackward>) {
    given.last_state = args.dlast_state.given();
    given.dinitial_state = args.dinitial_state.given();
  }
  return given;
}

template <class Args>
SsdPlan plan_of(Operation operation, const Args& args, const Execution& execution) {
  validate_untested(execution, "the state space dual");
  return make_ssd_plan(operation, validate(args, execution.device), args.options, given_in(args), execution);
}

template <class Args>
void check_call(const SsdPlan& plan, Operation operation, const Args& args, std::span<std::byte> scratch) {
  MlstmShape shape = validate(args, plan.scan.device);
  const bool aligned = std::exchange(shape.aligned, plan.scan.shape.aligned);  // not all kernels ask for it
  if (plan.operation != operation || plan.scan.shape != shape || plan.options != args.options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  if (plan.scan.device == Device::cuda && plan.given != given_in(args)) {
    refuse(
        "tfla: plan was made for a call with other optional tensors, or other rows of y, z and ungated; plan these "
        "arguments again");
  }
  if (!aligned && needs_alignment(plan.scan)) {
    refuse("tfla: plan was made for tensors whose rows begin on 16 bytes, in a dense batch; plan these arguments");
  }
  check_scratch(plan.scratch_bytes, scratch);
}

// Calls backend.*run with scratch of its own.
template <class Args>
void plan_and_run(const Args& args, const Execution& execution,
                  void (*SsdBackend::*run)(const Args&, const SsdPlan&, std::byte*, void*)) {
  if (execution.gpu) refuse("tfla: execution.gpu is given; it is for plans, and a call runs on the current GPU");
  const SsdPlan plan = ssd_plan(args, execution);
  const OwnScratch scratch(plan.scan.device, plan.scratch_bytes, execution.stream);
  (ssd_backend(plan.scan.device).*run)(args, plan, scratch.data(), execution.stream);
}

}  // namespace

SsdPlan ssd_plan(Operation operation, const MlstmShape& shape, const SsdOptions& options, const Execution& execution) {
  validate_untested(execution, "the state space dual");
  validate_options(options, operation);
  validate_shape(shape);
  return make_ssd_plan(operation, shape, options, {}, execution);
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
  ssd_backend(plan.scan.device).forward(args, plan, scratch.data(), stream);
}
void ssd_backward(const SsdBackward& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::backward, args, scratch);
  ssd_backend(plan.scan.device).backward(args, plan, scratch.data(), stream);
}
void ssd_step(const SsdStep& args, const SsdPlan& plan, std::span<std::byte> scratch, void* stream) {
  check_call(plan, Operation::step, args, scratch);
  ssd_backend(plan.scan.device).step(args, plan, scratch.data(), stream);
}

void ssd_forward(const SsdForward& args, const Execution& execution) {
  plan_and_run(args, execution, &SsdBackend::forward);
}
void ssd_backward(const SsdBackward& args, const Execution& execution) {
  plan_and_run(args, execution, &SsdBackend::backward);
}
void ssd_step(const SsdStep& args, const Execution& execution) { plan_and_run(args, execution, &SsdBackend::step); }

}  // namespace tfla
