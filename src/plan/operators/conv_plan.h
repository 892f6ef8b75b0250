// What is chosen for the convolution. Arguments are valid here (src/api).
#pragma once

#include "tfla/conv.h"

namespace tfla {

[[nodiscard]] ConvPlan make_conv_plan(Operation operation, const ConvShape& shape, const ConvOptions& options,
                                      const ConvGiven& given, const Execution& execution);

// The device cuda: ranges, launches and scratch.
void plan_conv_cuda(ConvPlan& plan);

}  // namespace tfla
