#include <algorithm>
#include <cmath>
#include <limits>

#include "testkit/bounds.h"
#include "tests/delta/problem.h"

namespace tfla::test {
namespace {

double norm(const Values& x) {
  double squares = 0;
  for (const double y : x) squares += y * y;
  return std::sqrt(squares);
}

double distance(const Values& x, const Values& y) {
  if (x.size() != y.size()) return std::numeric_limits<double>::infinity();
  double squares = 0;
  for (std::size_t at = 0; at < x.size(); ++at) squares += (x[at] - y[at]) * (x[at] - y[at]);
  return std::sqrt(squares);
}

Snapshot tensors(const reference::DeltaResult& r) {
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
  if (count < testkit::many_numbers) return testkit::unit_of_rounding(dtype);
  return dtype == DType::bfloat16 ? 2.5e-3 : 4e-4;
}

}  // namespace

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
// - dg of a token is the sum of q.dq - v.dv from it to the end of its tile, of at most 64 tokens, and of what is kept
// of
//   the state. Each of these dot products is good to some roundings, say four; a sum of 64, to eight times that. Where
//   decays are strong, dg itself is nothing next to them.
// - dA_log and ddt_bias are sums over all tokens. Each is as good as dg, and one dot product is in the dg of all tokens
//   of its tile before it, up to 64 times.
// - normalize_qk takes the part along a row from its gradient, and with a head dimension of 1 all but 1e-6 of it. The
//   row, the product and the difference are rounded: four times the unit of what is taken.
double DeltaJudge::allowed(const std::string& tensor) const {
  const Values& expected = expected_.at(tensor);
  const bool is_double = description_.shape.dtype == DType::float64, gradient = tensor.starts_with('d');
  const double unit = unit_of_arithmetic(description_), arithmetic = is_double ? 1e-10 : gradient ? 1e-4 : 1e-5;
  const DType dtype = stored_as(tensor);
  double error = (arithmetic + rounding(dtype, expected.size())) * norm(expected);
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

::testing::AssertionResult DeltaJudge::within_bounds(const Snapshot& actual) const {
  ::testing::AssertionResult failure = ::testing::AssertionFailure() << label(description_);
  bool good = true;
  for (const auto& [name, values] : actual) {
    const Values& expected = expected_.at(name);
    const double error = distance(values, expected), most = allowed(name);
    if (error <= most) continue;
    good = false;
    const auto wrong = std::count_if(values.begin(), values.end(), [](double x) { return !std::isfinite(x); });
    failure << "\n  " << name << ": off by " << error << " of " << norm(expected) << ", more than " << most << ", "
            << wrong << " not finite";
  }
  return good ? ::testing::AssertionSuccess() : failure;
}

::testing::AssertionResult DeltaJudge::agree(const Snapshot& actual, const Snapshot& other) const {
  for (const auto& [name, values] : other) {
    const double error = distance(actual.at(name), values), most = 2 * allowed(name);
    if (!(error <= most)) {
      return ::testing::AssertionFailure() << label(description_) << "\n  " << name << ": apart by " << error << " of "
                                           << norm(values) << ", more than " << most;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tfla::test
