// The one place that chooses. Arguments are valid here (src/api).
#pragma once

#include "tfla/plan.h"

namespace tfla {

[[nodiscard]] Plan make_plan(Operation operation, const MlstmShape& shape, const MlstmOptions& options,
                             const Execution& execution);

}  // namespace tfla
