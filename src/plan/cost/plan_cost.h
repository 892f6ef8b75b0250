// What a planned call costs: operations of its matrix products, bytes that must move.
#pragma once

#include "tfla/plan.h"

namespace tfla {

// Of a call without initial and last states. For sequences of different lengths the plan knows only the longest, and
// the count takes all of them to be like it; for dense batches it is exact (tests/analysis counts the products).
struct Cost {
  double flops = 0;         // of the matrix products as the backend executes them: whole squares, rebuilt states
  double useful_flops = 0;  // of those the method needs (analysis::products), the causal half of each square
  double bytes = 0;         // inputs, outputs and, for step, the states: each moved once
};

[[nodiscard]] Cost cost(const Plan& plan);

// Bytes of the tensors that a call reads and writes (q, k, v, h, gates; gradients for backward).
[[nodiscard]] double tensor_bytes(Operation operation, const MlstmShape& shape);

}  // namespace tfla
