#include "plan/operators/ssd_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/make_plan.h"
#include "plan/operators/ssd_backend.h"
#include "plan/operators/ssd_cuda.h"

namespace tfla {

namespace {

// Rows of a state that a thread takes at a time: all of a head's, unless there are too few heads to go round.
std::int64_t choose_panel(const Plan& scan) {
  constexpr std::int64_t least = 8;
  const MlstmShape& shape = scan.shape;
  const std::int64_t units = shape.batch * shape.heads;
  if (units == 0 || units >= 2 * scan.threads) return shape.dhv;
  const std::int64_t parts = (2 * scan.threads + units - 1) / units;
  return std::min(shape.dhv, std::max(least, (shape.dhv + parts - 1) / parts));
}

}  // namespace

SsdPlan make_ssd_plan(Operation operation, const MlstmShape& shape, const SsdOptions& options, const SsdGiven& given,
                      const Execution& execution) {
  const MlstmOptions scan{.gate = InputGate::log, .qk_scale = 1.0, .chunk_size = options.chunk_size};
  SsdPlan plan{.operation = operation, .options = options, .scan = make_plan(operation, shape, scan, execution)};
  plan.threads = plan.scan.threads;
  if (execution.device == Device::cuda) {
    plan.given = given;
    plan_ssd_cuda(plan);
    return plan;
  }
  if (operation == Operation::step) plan.panel = choose_panel(plan.scan);
  plan.scratch_bytes = cpu_scratch_bytes(plan);
  return plan;
}

std::string describe(const SsdPlan& plan) {
  std::string page =
      fmt::format("{:<16}{}\n", "operator", "the state space dual, as an mLSTM with q = C, k = B, v = x");
  if (plan.scan.device == Device::cuda) {
    std::string all;
    for (const Launch& launch : plan.launches)
      all += fmt::format("{}{}", all.empty() ? "" : ", ", name(static_cast<SsdKernel>(launch.kernel)));
    page += fmt::format("{:<16}{}\n", "its kernels", all);
    page += fmt::format("{:<16}{} bytes, those of the scan among them\n", "its scratch", plan.scratch_bytes);
  } else if (plan.operation == Operation::step) {
    page += fmt::format("{:<16}{} rows of a head's state per thread at a time\n", "panel", plan.panel);
  }
  return page + describe(plan.scan);
}

}  // namespace tfla
