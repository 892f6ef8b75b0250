// Products of a few rows: validation, plans, calls.
#include "tfla/linear.h"

#include <fmt/format.h>

#include <algorithm>

#include "api/scratch.h"
#include "api/validate.h"
#include "api/validate_parts.h"
#include "core/checks.h"
#include "plan/linear_backend.h"
#include "tfla/error.h"

namespace tfla {

namespace {

void check_rows(const char* name, const TensorView& view, const Linear& args) {
  check_tensor(name, view, {args.x.shape[0], args.weight.shape[0]}, "(R,O)", LastAxis::contiguous);
  check_same_dtype(name, view, "x", args.x.dtype);
}

void validate(const Linear& args) {
  check_rank("x", args.x, 2, "(R,I)");
  check_rank("weight", args.weight, 2, "(O,I)");
  check_dtype("x", args.x, floats);
  check_dtype("weight", args.weight, floats);
  check_tensor("x", args.x, {args.x.shape[0], args.x.shape[1]}, "(R,I)", LastAxis::contiguous);
  check_tensor("weight", args.weight, {args.weight.shape[0], args.x.shape[1]}, "(O,I)", LastAxis::contiguous);
  if ((args.weight.dtype == DType::float64) != (args.x.dtype == DType::float64)) {
    refuse(fmt::format("tfla: weight has dtype {} and x has {}; float64 goes with float64 alone",
                       name(args.weight.dtype), name(args.x.dtype)));
  }
  if (args.added.given()) check_rows("added", args.added, args);
  check_rows("y", args.y, args);
  OverlapCheck check;
  check.input("x", args.x);
  check.input("weight", args.weight);
  check.input("added", args.added);
  check.output_in_place_of("y", args.y, "added");
}

}  // namespace

LinearPlan linear_plan(const Linear& args, const Execution& execution) {
  if (execution.device == Device::cuda) {
    throw Unavailable("tfla: products of a few rows have no CUDA kernels; use the device cpu");
  }
  validate_execution(execution);
  validate(args);
  // A thread is worth so many bytes of the weights.
  constexpr std::int64_t worth = std::int64_t{1} << 16;
  const std::int64_t bytes = args.weight.shape[0] * args.weight.shape[1] * item_size(args.weight.dtype);
  const int most = execution.threads > 0 ? execution.threads : cpu_threads();
  LinearPlan plan{.threads = static_cast<int>(std::clamp<std::int64_t>(bytes / worth, 1, most)),
                  .compute = args.x.dtype == DType::float64 ? DType::float64 : DType::float32};
  plan.scratch_bytes = cpu_scratch_bytes(args, plan);
  return plan;
}

void linear(const Linear& args, const LinearPlan& plan, std::span<std::byte> scratch, void* /*stream*/) {
  if (linear_plan(args, {.threads = plan.threads}) != plan) {
    refuse("tfla: plan was made for other arguments; plan these arguments again");
  }
  check_scratch(plan.scratch_bytes, scratch);
  cpu_linear(args, plan, scratch.data());
}

void linear(const Linear& args, const Execution& execution) {
  const LinearPlan plan = linear_plan(args, execution);
  const OwnScratch scratch(Device::cpu, plan.scratch_bytes, nullptr);
  cpu_linear(args, plan, scratch.data());
}

}  // namespace tfla
