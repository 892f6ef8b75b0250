// Every error a caller of the state space dual can make is found here, before anything is written, and said in one
// sentence.
#pragma once

#include "tfla/ssd.h"

namespace tfla {

// Throw InvalidArgument, or return what the plan needs to know of the arguments.
[[nodiscard]] MlstmShape validate(const SsdForward& args, Device device);
[[nodiscard]] MlstmShape validate(const SsdBackward& args, Device device);
[[nodiscard]] MlstmShape validate(const SsdStep& args, Device device);

// Whether the rows of y, z and ungated lie as the fastest GPU kernels want them.
[[nodiscard]] bool has_aligned_epilogue(const SsdForward& args);

void validate_options(const SsdOptions& options, Operation operation);

}  // namespace tfla
