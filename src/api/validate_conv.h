// Every error a caller of the convolution can make is found here, before anything is written, and said in one sentence.
#pragma once

#include "tfla/conv.h"

namespace tfla {

// Throw InvalidArgument, or return what the plan needs to know of the arguments.
[[nodiscard]] ConvShape validate(const ConvForward& args, Device device);
[[nodiscard]] ConvShape validate(const ConvBackward& args, Device device);
[[nodiscard]] ConvShape validate(const ConvStep& args, Device device);

void validate_shape(const ConvShape& shape);
void validate_options(const ConvOptions& options, Operation operation);

}  // namespace tfla
