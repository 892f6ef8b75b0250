// What calls of the state space dual left in a problem's outputs, judged by the float64 reference.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "testkit/operators/delta_judge.h"
#include "testkit/operators/ssd_problem.h"

namespace tfla::testkit {

class SsdJudge {
 public:
  explicit SsdJudge(const SsdProblem& problem);
  [[nodiscard]] std::vector<DeltaError> errors(const DeltaResults& actual) const;
  [[nodiscard]] double allowed(const std::string& tensor) const;
  [[nodiscard]] const std::vector<double>& expected(const std::string& tensor) const { return expected_.at(tensor); }

 private:
  [[nodiscard]] DType stored_as(const std::string& tensor) const;
  [[nodiscard]] double of_terms(const std::string& tensor) const;

  SsdCase description_;
  reference::SsdResult answers_;
  DeltaResults expected_;
  double size_of_dy_;
};

}  // namespace tfla::testkit
