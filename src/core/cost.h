// Counts of the work in a plan: floating-point operations of the matrix products, bytes that must move.
#pragma once

#include "tfla/plan.h"

namespace tfla {

struct Cost {
  double flops = 0;         // as executed: whole squares of a tile
  double useful_flops = 0;  // only the causal half of each square
  double bytes = 0;         // inputs, outputs and, for step, the states: each moved once
};

[[nodiscard]] Cost cost(const Plan& plan);

// Bytes of the tensors that a call reads and writes (q, k, v, h, gates; gradients for backward).
[[nodiscard]] double tensor_bytes(Operation operation, const MlstmShape& shape);

}  // namespace tfla
