// The exact tables, one function per pass and formulation, and what they share. x stands for the tokens of the unit.
#pragma once

#include "tfla/analysis.h"

namespace tfla::tables {

using analysis::Model;
using analysis::Polynomial;
using analysis::Term;

[[nodiscard]] inline Polynomial constant(double value) { return {.constant = value}; }
[[nodiscard]] inline Polynomial linear(double value) { return {.linear = value}; }
[[nodiscard]] inline Polynomial quadratic(double value) { return {.quadratic = value}; }

// A running sum as the paper counts it: x (x + 1) / 2 additions.
[[nodiscard]] inline Polynomial running_sum() { return {.linear = 0.5, .quadratic = 0.5}; }

[[nodiscard]] std::vector<Term> chunkwise_flops(const Model& model);
[[nodiscard]] std::vector<Term> parallel_flops(const Model& model);
[[nodiscard]] std::vector<Term> recurrent_flops(const Model& model);
[[nodiscard]] std::vector<Term> chunkwise_bytes(const Model& model);
[[nodiscard]] std::vector<Term> parallel_bytes(const Model& model);
[[nodiscard]] std::vector<Term> recurrent_bytes(const Model& model);

[[nodiscard]] std::vector<Term> chunkwise_backward_flops(const Model& model);
[[nodiscard]] std::vector<Term> parallel_backward_flops(const Model& model);
[[nodiscard]] std::vector<Term> chunkwise_backward_bytes(const Model& model);
[[nodiscard]] std::vector<Term> parallel_backward_bytes(const Model& model);

}  // namespace tfla::tables
