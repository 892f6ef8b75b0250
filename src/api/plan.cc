// Plans of a shape or of arguments, which are validated first.
#include "api/validate.h"
#include "core/alignment.h"
#include "plan/cuda_plan.h"
#include "plan/make_plan.h"

namespace tfla {

namespace {

template <class Args>
Plan plan_of(Operation operation, const Args& args, const Execution& execution) {
  validate_execution(execution);
  return make_plan(operation, validate(args, execution.device), args.options, execution);
}

template <class Args>
bool fits_arguments(const Plan& plan, const Args& args) {
  return !needs_alignment(plan) || is_aligned(args);
}

}  // namespace

Plan plan(Operation operation, const MlstmShape& shape, const MlstmOptions& options, const Execution& execution) {
  validate_execution(execution);
  validate_options(options, operation);
  validate_shape(shape);
  return make_plan(operation, shape, options, execution);
}

Plan plan(const MlstmForward& args, const Execution& execution) { return plan_of(Operation::forward, args, execution); }
Plan plan(const MlstmBackward& args, const Execution& execution) {
  return plan_of(Operation::backward, args, execution);
}
Plan plan(const MlstmStep& args, const Execution& execution) { return plan_of(Operation::step, args, execution); }

bool fits(const Plan& plan, const MlstmForward& args) { return fits_arguments(plan, args); }
bool fits(const Plan& plan, const MlstmBackward& args) { return fits_arguments(plan, args); }
bool fits(const Plan& plan, const MlstmStep& args) { return fits_arguments(plan, args); }

}  // namespace tfla
