#include "tests/ssd/problem.h"

namespace tfla::test {

Execution execution_of(const SsdCase& c) {
  return {.device = c.device, .threads = c.threads, .portable = c.portable, .untested = true};
}

Snapshot run_forward(SsdProblem& problem) {
  problem.poison_forward();
  ssd_forward(problem.forward, execution_of(problem.description));
  return snapshot(outputs(problem.forward));
}

Snapshot run_backward(SsdProblem& problem) {
  problem.poison_backward();
  ssd_backward(problem.backward, execution_of(problem.description));
  return snapshot(outputs(problem.backward));
}

Snapshot run_both(SsdProblem& problem) {
  Snapshot both = run_forward(problem);
  both.merge(run_backward(problem));
  return both;
}

::testing::AssertionResult SsdJudge::within_bounds(const Snapshot& actual) const {
  ::testing::AssertionResult failure = ::testing::AssertionFailure() << label_;
  bool good = true;
  for (const testkit::DeltaError& found : judge_.errors(actual)) {
    if (found.ok()) continue;
    good = false;
    failure << "\n  " << found.tensor << ": off by " << found.error << " of " << found.size << ", more than "
            << found.allowed << ", " << found.not_finite << " not finite";
  }
  return good ? ::testing::AssertionSuccess() : failure;
}

::testing::AssertionResult SsdJudge::agree(const Snapshot& actual, const Snapshot& other) const {
  for (const auto& [name, values] : other) {
    const double error = testkit::distance(actual.at(name), values), most = 2 * judge_.allowed(name);
    if (!(error <= most)) {
      return ::testing::AssertionFailure()
             << label_ << "\n  " << name << ": apart by " << error << ", more than " << most;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tfla::test
