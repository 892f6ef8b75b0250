// The test kit of the delta rule, for GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include "testkit/operators/delta_judge.h"
#include "tests/support/support.h"

namespace tfla::test {

using testkit::all_delta_regimes;
using testkit::Decay;
using testkit::DeltaCase;
using testkit::DeltaProblem;
using testkit::DeltaRegime;
using testkit::outputs;
using Outputs = testkit::DeltaOutputs;

[[nodiscard]] Snapshot snapshot(const Outputs& views);

// Runs the calls of a problem on poisoned outputs, with the threads of its description.
[[nodiscard]] Snapshot run_forward(DeltaProblem& problem);
[[nodiscard]] Snapshot run_backward(DeltaProblem& problem);
[[nodiscard]] Snapshot run_both(DeltaProblem& problem);

// The reference's judgement of a problem.
class DeltaJudge {
 public:
  explicit DeltaJudge(const DeltaProblem& problem) : label_(label(problem.description)), judge_(problem) {}
  [[nodiscard]] ::testing::AssertionResult within_bounds(const Snapshot& actual) const;
  // The same against other results of the same problem: twice the bound, since both may be off.
  [[nodiscard]] ::testing::AssertionResult agree(const Snapshot& actual, const Snapshot& other) const;

 private:
  std::string label_;
  testkit::DeltaJudge judge_;
};

}  // namespace tfla::test
