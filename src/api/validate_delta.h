// Every error a caller of the delta rule can make is found here, before anything is written, and said in one sentence.
#pragma once

#include "tfla/delta.h"

namespace tfla {

// Throw InvalidArgument, or return what the plan needs to know of the arguments.
[[nodiscard]] DeltaShape validate(const DeltaForward& args, Device device);
[[nodiscard]] DeltaShape validate(const DeltaBackward& args, Device device);
[[nodiscard]] DeltaShape validate(const DeltaStep& args, Device device);

void validate_options(const DeltaOptions& options, Operation operation);

}  // namespace tfla
