// Rows of a test table in which every pair of values of any two factors meets at least once.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace tfla::test {

// One value index per factor.
using Row = std::vector<int>;
inline constexpr int unset = -1;

// `levels[x]` is the number of values of factor x. A row, possibly with unset entries, that `allowed` refuses is never
// built; pairs that cannot be had are left out. Greedy and deterministic.
[[nodiscard]] std::vector<Row> pairwise(const std::vector<int>& levels, const std::function<bool(const Row&)>& allowed);

}  // namespace tfla::test
