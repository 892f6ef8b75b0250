// Every error a caller can make is found here, before anything is written, and said in one sentence.
#pragma once

#include "tfla/plan.h"

namespace tfla {

// Throw InvalidArgument, or return what the plan needs to know of the arguments.
[[nodiscard]] MlstmShape validate(const MlstmForward& args);
[[nodiscard]] MlstmShape validate(const MlstmBackward& args);
[[nodiscard]] MlstmShape validate(const MlstmStep& args);

void validate_shape(const MlstmShape& shape);
void validate_options(const MlstmOptions& options, Operation operation);
void validate_execution(const Execution& execution);

}  // namespace tfla
