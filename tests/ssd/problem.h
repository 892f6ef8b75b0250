// The test kit of the state space dual, for GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include "testkit/operators/ssd_judge.h"
#include "tests/delta/problem.h"  // snapshot of outputs
#include "tests/support/support.h"

namespace tfla::test {

using testkit::all_ssd_regimes;
using testkit::outputs;
using testkit::Skip;
using testkit::SsdCase;
using testkit::SsdProblem;
using testkit::SsdRegime;

// Where and by which kernels a case runs. Kernels for GPUs are not open to other calls.
[[nodiscard]] Execution execution_of(const SsdCase& c);

// Runs the calls of a problem on poisoned outputs, where its description says. Backward reads what the
// forward before it left in `ungated`.
[[nodiscard]] Snapshot run_forward(SsdProblem& problem);
[[nodiscard]] Snapshot run_backward(SsdProblem& problem);
[[nodiscard]] Snapshot run_both(SsdProblem& problem);

// The reference's judgement of a problem.
class SsdJudge {
 public:
  explicit SsdJudge(const SsdProblem& problem) : label_(label(problem.description)), judge_(problem) {}
  [[nodiscard]] ::testing::AssertionResult within_bounds(const Snapshot& actual) const;
  // The same against other results of the same problem: twice the bound, since both may be off.
  [[nodiscard]] ::testing::AssertionResult agree(const Snapshot& actual, const Snapshot& other) const;

 private:
  std::string label_;
  testkit::SsdJudge judge_;
};

}  // namespace tfla::test
