// The tables of cases of the state space dual: every pair of values of its factors, and the regimes that strain the
// arithmetic.
#pragma once

#include <vector>

#include "tests/ssd/problem.h"
#include "tests/support/pairwise.h"

namespace tfla::test {

// A full table, and one small enough for sanitizers.
enum class SsdTable : std::uint8_t { full, few };

[[nodiscard]] std::vector<int> ssd_levels(SsdTable which);  // how many values each factor has
[[nodiscard]] std::vector<Row> ssd_rows(SsdTable which);
[[nodiscard]] std::vector<SsdCase> ssd_pairs(SsdTable which);
// Every regime with and without softplus, limits, numbers of sequences and 16 bits.
[[nodiscard]] std::vector<SsdCase> ssd_regimes(std::int64_t tokens, std::int64_t dim, std::int64_t state_dim);
// Few dimensions and many tokens: errors of states that are carried on and on, and gradients all the way back.
[[nodiscard]] std::vector<SsdCase> ssd_long_cases();
// Cases of 16 bits that Hopper's forward takes: every tile, with the epilogue in it and behind it. On other GPUs there
// is nothing to see in them.
[[nodiscard]] std::vector<SsdCase> ssd_hopper_cases();
[[nodiscard]] std::vector<SsdCase> ssd_hopper_regimes();
[[nodiscard]] std::string ssd_case_name(const ::testing::TestParamInfo<SsdCase>& info);

}  // namespace tfla::test
