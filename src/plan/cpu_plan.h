// The CPU's part of a plan.
#pragma once

#include <string_view>

#include "tfla/plan.h"

namespace tfla {

// Bytes of one head's state in the arithmetic type.
[[nodiscard]] double state_bytes(const Plan& plan);

// Token by token, on either device.
void choose_recurrent_ranges(Plan& plan);

void plan_cpu(Plan& plan);
[[nodiscard]] std::string_view describe_pass(const Launch& launch);

}  // namespace tfla
