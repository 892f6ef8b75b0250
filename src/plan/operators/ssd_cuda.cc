#include "plan/operators/ssd_cuda.h"

#include <algorithm>

#include "plan/kernel_table.h"
#include "plan/operators/ssd_plan.h"

namespace tfla {

const char* name(SsdKernel kernel) {
  switch (kernel) {
    case SsdKernel::turn_states: return "turn_states";
    case SsdKernel::time_steps: return "time_steps";
    case SsdKernel::epilogue_gradients: return "epilogue_gradients";
    case SsdKernel::scan: return "scan";
    case SsdKernel::epilogue: return "epilogue";
    case SsdKernel::skip_gradients: return "skip_gradients";
    case SsdKernel::time_step_gradients: return "time_step_gradients";
    case SsdKernel::sum_tokens: return "sum_tokens";
    case SsdKernel::turn_back: return "turn_back";
    case SsdKernel::step: return "step";
  }
  return "";
}

bool has_fused_epilogue(const SsdPlan& plan) {
  return plan.operation == Operation::forward && plan.scan.device == Device::cuda &&
         std::ranges::any_of(plan.scan.launches, [](const Launch& launch) { return is(launch, variant::epilogue); });
}

namespace {

// Hopper's forward ends with the epilogue where a kernel is compiled for that.
void fuse_epilogue(SsdPlan& plan) {
  if (!plan.given.aligned) return;
  Launches launches;
  for (Launch launch : plan.scan.launches) {
    if (row_of(launch).has_epilogue(plan.scan.shape)) launch.variant |= variant::epilogue;
    launches.add(launch);
  }
  plan.scan.launches = launches;
}

}  // namespace

void plan_ssd_cuda(SsdPlan& plan) {
  const auto add = [&plan](SsdKernel kernel, bool wanted = true) {
    if (wanted) plan.launches.add({.kernel = static_cast<std::uint8_t>(kernel)});
  };
  const SsdGiven& given = plan.given;
  if (plan.operation == Operation::step) {
    plan.scan.launches = {};
    plan.scan.scratch_bytes = 0;
    return add(SsdKernel::step);
  }
  const bool forward = plan.operation == Operation::forward, has_epilogue = forward && (given.D || given.z);
  if (has_epilogue) fuse_epilogue(plan);
  add(SsdKernel::turn_states, given.initial_state || (!forward && given.last_state));
  add(SsdKernel::time_steps);
  if (forward) {
    add(SsdKernel::scan);
    add(SsdKernel::epilogue, has_epilogue && !has_fused_epilogue(plan));
    add(SsdKernel::turn_back, given.last_state);
  } else {
    add(SsdKernel::epilogue_gradients, given.z);
    add(SsdKernel::scan);
    add(SsdKernel::skip_gradients, given.D);
    add(SsdKernel::time_step_gradients);
    add(SsdKernel::sum_tokens);
    add(SsdKernel::turn_back, given.dinitial_state);
  }
  Arena arena;
  if (plan.scan.compute == DType::float64) {
    (void)SsdScratch<double>(arena, plan);
  } else {
    (void)SsdScratch<float>(arena, plan);
  }
  plan.scratch_bytes = arena.used();
}

}  // namespace tfla
