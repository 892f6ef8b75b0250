#include <fmt/format.h>

#include <type_traits>
#include <utility>

#include "api/scratch.h"
#include "api/validate.h"
#include "core/checks.h"
#include "plan/backend.h"
#include "plan/cuda_plan.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

void check_saved(const Plan& plan, std::span<const std::byte> saved) {
  if (saved.size() != plan.saved_bytes) {
    refuse(fmt::format("tfla: saved has {} bytes; the plan has {}{}", saved.size(), plan.saved_bytes,
                       plan.keep != Keep::nothing ? "" : ", since options.keep is nothing"));
  }
  if (reinterpret_cast<std::uintptr_t>(saved.data()) % scratch_alignment != 0) {
    refuse(fmt::format("tfla: saved is not aligned to {} bytes", scratch_alignment));
  }
}

void check_plan(const Plan& plan, Operation operation, MlstmShape shape, const MlstmOptions& options,
                std::span<std::byte> scratch, std::span<const std::byte> saved = {}) {
  const bool aligned = std::exchange(shape.aligned, plan.shape.aligned);  // not all kernels ask for it
  if (plan.operation != operation || plan.shape != shape || plan.options != options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  if (!aligned && needs_alignment(plan)) {
    refuse("tfla: plan was made for tensors whose rows begin on 16 bytes, in a dense batch; plan these arguments");
  }
  check_scratch(plan.scratch_bytes, scratch);
  check_saved(plan, saved);
}

void run(const MlstmForward& args, const Plan& plan, std::byte* scratch, void* stream) {
  backend(plan.device).forward(args, plan, scratch, stream);
}
void run(const MlstmBackward& args, const Plan& plan, std::byte* scratch, void* stream) {
  backend(plan.device).backward(args, plan, scratch, stream);
}
void run(const MlstmStep& args, const Plan& plan, std::byte* scratch, void* stream) {
  backend(plan.device).step(args, plan, scratch, stream);
}

template <class Args>
void plan_and_run(const Args& args, const Execution& execution) {
  if (execution.gpu) refuse("tfla: execution.gpu is given; it is for plans, and a call runs on the current GPU");
  const Plan chosen = plan(args, execution);
  if constexpr (!std::is_same_v<Args, MlstmStep>) check_saved(chosen, args.saved);
  const OwnScratch scratch(chosen.device, chosen.scratch_bytes, execution.stream);
  run(args, chosen, scratch.data(), execution.stream);
}

}  // namespace

void forward(const MlstmForward& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
  check_plan(plan, Operation::forward, validate(args, plan.device), args.options, scratch, args.saved);
  run(args, plan, scratch.data(), stream);
}

void backward(const MlstmBackward& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
  check_plan(plan, Operation::backward, validate(args, plan.device), args.options, scratch, args.saved);
  run(args, plan, scratch.data(), stream);
}

void step(const MlstmStep& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
  check_plan(plan, Operation::step, validate(args, plan.device), args.options, scratch);
  run(args, plan, scratch.data(), stream);
}

void forward(const MlstmForward& args, const Execution& execution) { plan_and_run(args, execution); }
void backward(const MlstmBackward& args, const Execution& execution) { plan_and_run(args, execution); }
void step(const MlstmStep& args, const Execution& execution) { plan_and_run(args, execution); }

}  // namespace tfla
