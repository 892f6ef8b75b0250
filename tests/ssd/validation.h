// Bad arguments of the state space dual: tables of them, and the calls that they spoil.
#pragma once

#include <vector>

#include "tests/ssd/problem.h"
#include "tests/support/validation.h"

namespace tfla::test {

[[nodiscard]] SsdCase good_ssd_case();
[[nodiscard]] Snapshot all_contents(const SsdProblem& problem);

// Rows that hold for forward, backward and step alike.
template <class Args>
[[nodiscard]] std::vector<BadRow<Args>> common_ssd_rows();
// Rows of forward and backward, which have an initial state and sequences in a row.
template <class Args>
[[nodiscard]] std::vector<BadRow<Args>> sequence_ssd_rows();

[[nodiscard]] const std::vector<BadRow<SsdForward>>& ssd_forward_rows();
[[nodiscard]] const std::vector<BadRow<SsdBackward>>& ssd_backward_rows();
[[nodiscard]] const std::vector<BadRow<SsdStep>>& ssd_step_rows();

}  // namespace tfla::test
