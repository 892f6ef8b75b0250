// What is chosen for the delta rule. Arguments are valid here (src/api).
#pragma once

#include "tfla/delta.h"

namespace tfla {

[[nodiscard]] DeltaPlan make_delta_plan(Operation operation, const DeltaShape& shape, const DeltaOptions& options,
                                        const Execution& execution);

// The device cuda: token ranges; launches, slices and scratch.
void choose_cuda_ranges(DeltaPlan& plan, bool portable);
void plan_delta_cuda(DeltaPlan& plan, bool portable);

}  // namespace tfla
