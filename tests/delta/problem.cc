#include "tests/delta/problem.h"

namespace tfla::test {

Snapshot snapshot(const Outputs& views) {
  Snapshot taken_now;
  for (const auto& [name, view] : views) taken_now[name] = testkit::gather(view);
  return taken_now;
}

namespace {

Execution execution_of(const DeltaProblem& problem) {
  const DeltaCase& c = problem.description;
  return {.device = c.device, .threads = c.threads, .portable = !c.on_chip, .untested = true};
}

}  // namespace

Snapshot run_forward(DeltaProblem& problem) {
  problem.poison();
  delta_forward(problem.forward, execution_of(problem));
  return snapshot(outputs(problem.forward));
}

Snapshot run_backward(DeltaProblem& problem) {
  problem.poison();
  delta_backward(problem.backward, execution_of(problem));
  return snapshot(outputs(problem.backward));
}

Snapshot run_both(DeltaProblem& problem) {
  Snapshot both = run_forward(problem);
  both.merge(run_backward(problem));
  return both;
}

::testing::AssertionResult DeltaJudge::within_bounds(const Snapshot& actual) const {
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

::testing::AssertionResult DeltaJudge::agree(const Snapshot& actual, const Snapshot& other) const {
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
