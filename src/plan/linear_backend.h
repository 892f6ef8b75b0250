// Products of a few rows on a backend, as the API sees them.
#pragma once

#include <cstddef>

#include "tfla/linear.h"

namespace tfla {

void cpu_linear(const Linear& args, const LinearPlan& plan, std::byte* scratch);
[[nodiscard]] std::size_t cpu_scratch_bytes(const Linear& args, const LinearPlan& plan);

}  // namespace tfla
