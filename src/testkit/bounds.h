// The errors that this project allows (docs/numerics.md).
#pragma once

#include <cstdint>
#include <string>

#include "testkit/judge.h"

namespace tfla::testkit {

// The relative error of one rounding to a 16-bit dtype; 0 for others.
[[nodiscard]] double unit_of_rounding(DType dtype);
// Whether products read 16-bit numbers.
[[nodiscard]] bool on_tensor_cores(const Case& description);
inline constexpr std::int64_t many_numbers = 1024;  // of which a relative error is a root mean square

// The bound on the relative error of `tensor` that this project promises (docs/numerics.md). On a GPU, 16-bit products
// are rounded on the way: there the bound is what the paper's kernels reach, and a fifth of it for df above 1e-2.
[[nodiscard]] double bound(const std::string& tensor, Regime regime, DType dtype, Device device = Device::cpu);

// That bound for a case: a 16-bit number counts by the root mean square of its rounding over many elements, and where
// few make up the norm, by all of it.
[[nodiscard]] double allowed_error(const std::string& tensor, const Case& description);

// The same where it is known how much the denominators cancel. The recurrent formulation rounds its state at every
// token; what sixteen such roundings make of h is allowed too. On tensor cores so is what four roundings of the states
// make of df where few numbers make it up: each is a sum over the state, and it may nearly cancel.
[[nodiscard]] double allowed_error(const TensorError& error, const Case& description);

}  // namespace tfla::testkit
