// What is chosen for the state space dual. Arguments are valid here (src/api).
#pragma once

#include "tfla/ssd.h"

namespace tfla {

[[nodiscard]] SsdPlan make_ssd_plan(Operation operation, const MlstmShape& shape, const SsdOptions& options,
                                    const SsdGiven& given, const Execution& execution);

// The device cuda: launches and scratch.
void plan_ssd_cuda(SsdPlan& plan);

}  // namespace tfla
