#include "testkit/operators/ssd_judge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "testkit/bounds.h"

namespace tfla::testkit {
namespace {

using Values = std::vector<double>;

double norm(const Values& x) { return distance(x, Values(x.size())); }

DeltaResults tensors(const reference::SsdResult& r) {
  return {{"y", r.y},
          {"ungated", r.ungated},
          {"S", r.last_state},
          {"dx", r.dx},
          {"ddt", r.ddt},
          {"dA", r.dA},
          {"dB", r.dB},
          {"dC", r.dC},
          {"dD", r.dD},
          {"dz", r.dz},
          {"ddt_bias", r.ddt_bias},
          {"dS0", r.dinitial_state}};
}

// The relative error of rounding a result, as testkit/bounds.h has it: by its root mean square where many numbers make
// up the norm.
double rounding(DType dtype, std::size_t count) {
  if (dtype == DType::float64) return 0;
  if (dtype == DType::float32) return 0x1p-24;
  if (count < many_numbers) return unit_of_rounding(dtype);
  return dtype == DType::bfloat16 ? 2.5e-3 : 4e-4;
}

}  // namespace

SsdJudge::SsdJudge(const SsdProblem& problem) : description_(problem.description) {
  const reference::SsdCall call = problem.call();
  answers_ = reference::evaluate(call, description_.options);
  expected_ = tensors(answers_);
  size_of_dy_ = norm(call.dy);
}

DType SsdJudge::stored_as(const std::string& tensor) const {
  const MlstmShape& s = description_.shape;
  if (tensor == "S" || tensor == "dS0") return s.dtype == DType::float64 ? DType::float64 : DType::float32;
  if (tensor == "ddt") return s.gate_dtype;
  if (tensor == "dA" || tensor == "ddt_bias") return description_.A_dtype;
  return tensor == "dD" ? description_.D_dtype : s.dtype;
}

// What large terms leave of each other:
// - A row of products is good to some roundings of its terms, say four: y, dz, dx, dB, dC, and dD over all tokens.
// - The gradient of a log decay is the product of what the decay leaves of the state and the gradient of that, and the
//   gradient of a weight that of x B^T and the same. Either is a sum of up to 64 tokens of a tile and of a state: eight
//   times four roundings of the product of their norms. ddt is made of both.
// - dA and ddt_bias are sums over all tokens. What is rounded in one place is in the ddt of up to 64 tokens of a tile:
//   eight times as much again.
// - Sums of rows and columns of a tile telescope into the gradients of its decays, in double. Where decays are strong
//   those are far smaller than the sums: 64 roundings of double of each, in up to 64 tokens.
// On a GPU, operands of 16-bit products are rounded on the way, and so is the gradient of h: scores, states and their
// gradients to bfloat16 at the worst, by its root mean square. The sums that telescope are float32 there
// (cuda::Config::sum_terms).
double SsdJudge::of_terms(const std::string& tensor) const {
  const reference::SsdTerms& t = answers_.terms;
  const bool is_double = description_.shape.dtype == DType::float64;
  const bool rounds = description_.device == Device::cuda && unit_of_rounding(description_.shape.dtype) > 0;
  const double unit = is_double ? 0x1p-53 : rounds ? rounding(DType::bfloat16, many_numbers) : 0x1p-24;
  const double arithmetic = is_double ? 1e-10 : 1e-4;
  const double unit_of_sums = rounds ? 0x1p-24 : 0x1p-53;
  const double rows[] = {t.ungated, t.y, t.dz, t.dx, t.dB, t.dC, t.dD};
  constexpr const char* names[] = {"ungated", "y", "dz", "dx", "dB", "dC", "dD"};
  const auto row = std::find(std::begin(names), std::end(names), tensor);
  if (row != std::end(names)) return 4 * unit * rows[row - std::begin(names)];
  if (tensor == "ddt") return 8 * 4 * unit * t.ddt + 64 * unit_of_sums * t.ddt_pairs;
  if (tensor == "dA") {
    return arithmetic * t.dA + 64 * 4 * unit * t.dA_sums + 64 * 64 * unit_of_sums * t.dA_pairs;
  }
  if (tensor == "ddt_bias") {
    return arithmetic * t.ddt_bias + 64 * 4 * unit * t.ddt + 64 * 64 * unit_of_sums * t.ddt_pairs;
  }
  if (rounds && (tensor == "S" || tensor == "dS0")) return 4 * unit * norm(expected_.at(tensor));
  return 0;
}

// How far off a tensor may be, in the norm: the bounds of docs/numerics.md on arithmetic and on the rounding of the
// result, and what is said above. dz reads `ungated`, which is rounded itself.
double SsdJudge::allowed(const std::string& tensor) const {
  const Values& expected = expected_.at(tensor);
  const bool is_double = description_.shape.dtype == DType::float64, gradient = tensor.starts_with('d');
  const double arithmetic = is_double ? 1e-10 : gradient ? 1e-4 : 1e-5;
  const DType dtype = stored_as(tensor);
  const double rounded = rounding(dtype, expected.size()) * (tensor == "dz" ? 2 : 1);
  // Subnormal numbers: of float16 where it is stored, of the arithmetic elsewhere.
  const double least = dtype == DType::float16 ? 0x1p-25
                       : is_double             ? std::numeric_limits<double>::min()
                                               : std::numeric_limits<float>::min();
  double subnormal = least * std::sqrt(static_cast<double>(expected.size()));
  if (tensor == "dz") subnormal += least * 1.1 * size_of_dy_;  // 1.1 is the steepest slope of silu
  return (arithmetic + rounded) * norm(expected) + of_terms(tensor) + subnormal;
}

std::vector<DeltaError> SsdJudge::errors(const DeltaResults& actual) const {
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
