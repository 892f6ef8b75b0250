// The CPU backend's door: what the API calls once arguments are valid and planned.
#pragma once

#include <cstddef>

#include "tfla/plan.h"

namespace tfla::cpu {

[[nodiscard]] std::size_t scratch_bytes(const Plan& plan);
[[nodiscard]] int default_threads();

void forward(const MlstmForward& args, const Plan& plan, std::byte* scratch);
void backward(const MlstmBackward& args, const Plan& plan, std::byte* scratch);
void step(const MlstmStep& args, const Plan& plan, std::byte* scratch);

}  // namespace tfla::cpu
