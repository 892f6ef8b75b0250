// What is chosen for the state space dual. Arguments are valid here (src/api).
#pragma once

#include "tfla/ssd.h"

namespace tfla {

[[nodiscard]] SsdPlan make_ssd_plan(Operation operation, const MlstmShape& shape, const SsdOptions& options,
                                    const Execution& execution);

}  // namespace tfla
