// tfla check --operator delta.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tfla/tfla.h"

namespace tfla::cli {

struct DeltaCheck {
  DeltaShape shape;
  std::vector<DType> dtypes;
  std::int64_t chunk = 0;  // 0: the plan's choice, and one that divides nothing
  std::uint64_t seed = 1;
  Execution execution;
  std::string json;
};

// Prints a table; the exit code.
[[nodiscard]] int check_delta(const DeltaCheck& options);

}  // namespace tfla::cli
