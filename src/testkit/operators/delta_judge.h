// What calls of the delta rule left in a problem's outputs, judged by the float64 reference.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "testkit/operators/delta_problem.h"

namespace tfla::testkit {

// Tensors by name, each in row-major order of its logical shape.
using DeltaResults = std::map<std::string, std::vector<double>>;

// ||x - y||
[[nodiscard]] double distance(const std::vector<double>& x, const std::vector<double>& y);

struct DeltaError {
  std::string tensor;
  double error = 0;             // ||x - ref||; NaN where x has one
  double allowed = 0;           // the most that it may be
  double size = 0;              // ||ref||
  std::int64_t not_finite = 0;  // numbers of x

  [[nodiscard]] bool ok() const { return error <= allowed; }
};

class DeltaJudge {
 public:
  explicit DeltaJudge(const DeltaProblem& problem);
  [[nodiscard]] std::vector<DeltaError> errors(const DeltaResults& actual) const;
  [[nodiscard]] double allowed(const std::string& tensor) const;

 private:
  [[nodiscard]] DType stored_as(const std::string& tensor) const;

  DeltaCase description_;
  reference::DeltaResult answers_;
  DeltaResults expected_;
};

}  // namespace tfla::testkit
