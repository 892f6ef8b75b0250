#include <fmt/format.h>

#include "core/checks.h"
#include "plan/backend.h"
#include "plan/cost/plan_cost.h"
#include "plan/cpu_plan.h"
#include "plan/cuda_plan.h"
#include "plan/cuda_scratch.h"
#include "plan/make_plan.h"
#include "tfla/error.h"

namespace tfla {

namespace {

// Sizes are counted in 64 bits; a shape whose scratch would come near that is refused, whatever memory there is.
void check_countable(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  const auto tile = static_cast<double>(plan.tile);
  const double tokens =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) * static_cast<double>(shape.heads);
  const double spans = plan.span == 0 ? 0
                                      : tokens / static_cast<double>(plan.span) +
                                            static_cast<double>(shape.sequences) * static_cast<double>(shape.heads);
  const double per_thread =
      plan.chunk == 0 ? 4 : 4 + static_cast<double>(plan.span / plan.chunk + plan.chunk / plan.tile);
  const double dims = static_cast<double>(shape.dqk) + static_cast<double>(shape.dhv);
  const double bytes = tokens * 128 + (2 * spans + plan.threads * per_thread) * 4 * state_bytes(plan) +
                       plan.threads * (static_cast<double>(plan.span) * 2 + tile * 16 + 64) * (dims + tile) * 8;
  if (bytes < 0x1p60) return;
  refuse(
      fmt::format("tfla: q has head dimension {} and v has {} over {} tokens; scratch for that does not fit in memory",
                  shape.dqk, shape.dhv, shape.tokens));
}

void count_bytes(Plan& plan) {
  if (plan.device == Device::cpu) {
    plan.scratch_bytes = cpu_scratch_bytes(plan);
    return;
  }
  plan.saved_bytes = lay_out(plan).saved_bytes();
  // A step by one launch takes none.
  const bool one_launch = plan.operation == Operation::step && launches(plan, Kernel::step, Needs::clusters);
  plan.scratch_bytes = one_launch ? 0 : lay_out(largest_slice(plan)).scratch_bytes();
}

}  // namespace

Plan make_plan(Operation operation, const MlstmShape& shape, const MlstmOptions& options, const Execution& execution) {
  const bool cuda = execution.device == Device::cuda;
  Plan plan{.operation = operation,
            .device = execution.device,
            .formulation = operation == Operation::step ? Formulation::recurrent : options.formulation,
            .shape = shape,
            .options = options,
            .compute = shape.dtype == DType::float64 ? DType::float64 : DType::float32,
            .threads = execution.threads > 0 ? execution.threads : cpu_threads()};
  if (cuda) plan.gpu = execution.gpu ? *execution.gpu : backend(Device::cuda).facts();
  cuda ? plan_cuda(plan, execution.portable) : plan_cpu(plan);
  check_countable(plan);
  count_bytes(plan);
  const Cost work = cost(plan);
  plan.flops = work.flops;
  plan.useful_flops = work.useful_flops;
  plan.bytes = work.bytes;
  return plan;
}

const Backend& backend(Device device) {
  if (device == Device::cpu) return cpu_backend();
  if (const Backend* cuda = cuda_backend()) return *cuda;
  throw Unavailable("tfla: this build has no CUDA backend; use the device cpu, or build with -DTFLA_CUDA=ON");
}

const Instruments& gpu_instruments() { return *backend(Device::cuda).instruments; }

}  // namespace tfla
