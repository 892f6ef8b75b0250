// y = x W^T (+ added) for a few rows x: the products of a decoder that writes one token after another. They take as long
// as reading the weights does, of 16 bits too, which are widened on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tfla/plan.h"

namespace tfla {

struct Linear {
  TensorView x;           // [R,I]  float32, float64, bfloat16 or float16
  TensorView weight;      // [O,I]  any float dtype; float64 where x is, and nowhere else
  TensorView added = {};  // [R,O]  optional, dtype of x; may be the very view of y
  MutableTensorView y;    // [R,O]  out, dtype of x
};

struct LinearPlan {
  int threads = 1;
  DType compute = DType::float32;  // float64 for float64 inputs, else float32
  std::size_t scratch_bytes = 0;

  bool operator==(const LinearPlan&) const = default;
};

[[nodiscard]] LinearPlan linear_plan(const Linear& args, const Execution& execution = {});

// Validate, plan, allocate scratch, run. On the CPU: the device cuda is refused.
void linear(const Linear& args, const Execution& execution = {});

// The same without allocation: `scratch` as in tfla/tfla.h.
void linear(const Linear& args, const LinearPlan& plan, std::span<std::byte> scratch, void* stream = nullptr);

}  // namespace tfla
