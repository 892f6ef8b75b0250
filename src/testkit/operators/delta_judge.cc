#include "testkit/operators/delta_judge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "testkit/bounds.h"

namespace tfla::testkit {
namespace {

using Values = std::vector<double>;

double norm(const Values& x) {
  double squares = 0;
  for (const double y : x) squares += y * y;
  return std::sqrt(squares);
}

DeltaResults tensors(const reference::DeltaResult& r) {
  return {{"h", r.h},
          {"C", r.last_state},
          {"dq", r.dq},
          {"dk", r.dk},
          {"dv", r.dv},
          {"dbeta", r.dbeta},
          {"dg", r.dg},
          {"dA_log", r.dA_log},
          {"ddt_bias", r.ddt_bias},
          {"dC0", r.dinitial_state}};
}

double unit_of_arithmetic(const DeltaCase& c) { return c.shape.dtype == DType::float64 ? 0x1p-53 : 0x1p-24; }

// The relative error of rounding a result, as testkit/bounds.h has it: by its root mean square where many numbers make
// up the norm.
double rounding(DType dtype, std::size_t count) {
  if (dtype == DType::float64) return 0;
  if (dtype == DType::float32) return 0x1p-24;
  if (count < many_numbers) return unit_of_rounding(dtype);
  return dtype == DType::bfloat16 ? 2.5e-3 : 4e-4;
}

}  // namespace

double distance(const std::vector<double>& x, const std::vector<double>& y) {
  if (x.size() != y.size()) return std::numeric_limits<double>::infinity();
  double squares = 0;
  for (std::size_t at = 0; at < x.size(); ++at) squares += (x[at] - y[at]) * (x[at] - y[at]);
  return std::sqrt(squares);
}

DeltaJudge::DeltaJudge(const DeltaProblem& problem)
    : description_(problem.description),
      answers_(reference::evaluate(problem.call(), description_.options)),
      expected_(tensors(answers_)) {}

DType DeltaJudge::stored_as(const std::string& tensor) const {
  const DeltaShape& s = description_.shape;
  if (tensor == "C" || tensor == "dC0") return s.dtype == DType::float64 ? DType::float64 : DType::float32;
  if (tensor == "dbeta") return s.gate_dtype;
  return tensor == "dg" || tensor == "dA_log" || tensor == "ddt_bias" ? description_.g_dtype : s.dtype;
}

// How far off a tensor may be, in the norm. The bounds of docs/numerics.md on arithmetic and on the rounding of the
// result, and where a result is what large terms leave of each other:
// - dg of a token is the product of what its decay leaves of the state and the gradient of that. Numbers of either are
//   sums of up to 64 tokens of a tile and of a state, each good to some roundings, say four: eight times four of the
//   product of their norms.
// - dA_log and ddt_bias are sums over all tokens. What is rounded in one place is in the dg of up to 64 tokens of a
//   tile: eight times as much again.
// - Hopper's products read operands that are rounded to bfloat16 (docs/cuda/delta.md): h and the state may be off by
// 6e-3,
//   with the rounding of h in it.
// - normalize_qk takes the part along a row from its gradient, and with a head dimension of 1 all but 1e-6 of it. The
//   row, the product and the difference are rounded: four times the unit of what is taken.
double DeltaJudge::allowed(const std::string& tensor) const {
  const Values& expected = expected_.at(tensor);
  const bool is_double = description_.shape.dtype == DType::float64, gradient = tensor.starts_with('d');
  const double unit = unit_of_arithmetic(description_), arithmetic = is_double ? 1e-10 : gradient ? 1e-4 : 1e-5;
  const DType dtype = stored_as(tensor);
  double error = (arithmetic + rounding(dtype, expected.size())) * norm(expected);
  if (description_.on_chip) error = (tensor == "dg" ? 8e-3 : 6e-3) * norm(expected);
  if (tensor == "dg") error += 8 * 4 * unit * answers_.dg_terms;
  if (tensor == "dA_log") error += arithmetic * answers_.dA_log_terms + 64 * 4 * unit * answers_.dA_log_sums;
  if (tensor == "ddt_bias") error += arithmetic * answers_.ddt_bias_terms + 64 * 4 * unit * answers_.dg_terms;
  if (tensor == "dq") error += 4 * unit * answers_.dq_terms;
  if (tensor == "dk") error += 4 * unit * answers_.dk_terms;
  // Subnormal numbers: of float16 where it is stored, of the arithmetic elsewhere.
  const double least = dtype == DType::float16 ? 0x1p-25
                       : is_double             ? std::numeric_limits<double>::min()
                                               : std::numeric_limits<float>::min();
  return error + least * std::sqrt(static_cast<double>(expected.size()));
}

std::vector<DeltaError> DeltaJudge::errors(const DeltaResults& actual) const {
  std::vector<DeltaError> all;
  for (const auto& [name, values] : actual) {
    const Values& expected = expected_.at(name);
    const auto wrong = std::count_if(values.begin(), values.end(), [](double x) { return !std::isfinite(x); });
    all.push_back({.tensor = name,
                   .error = distance(values, expected),
                   .allowed = allowed(name),
                   .size = norm(expected),
                   .not_finite = wrong});
  }
  return all;
}

}  // namespace tfla::testkit
