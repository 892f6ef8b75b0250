#include "tests/support/pairwise.h"

#include <set>
#include <tuple>

namespace tfla::test {
namespace {

using Pair = std::tuple<std::size_t, int, std::size_t, int>;  // factor and value, later factor and value

Pair ordered(std::size_t x, int value_x, std::size_t y, int value_y) {
  return x < y ? Pair{x, value_x, y, value_y} : Pair{y, value_y, x, value_x};
}

// How many open pairs `row` would close if factor x took this value.
std::size_t gain(const std::set<Pair>& open, const Row& row, std::size_t x, int value) {
  std::size_t pairs = 0;
  for (std::size_t y = 0; y < row.size(); ++y) {
    if (y != x && row[y] != unset) pairs += open.count(ordered(x, value, y, row[y]));
  }
  return pairs;
}

}  // namespace

std::vector<Row> pairwise(const std::vector<int>& levels, const std::function<bool(const Row&)>& allowed) {
  const std::size_t factors = levels.size();
  std::set<Pair> open;
  for (std::size_t x = 0; x < factors; ++x) {
    for (std::size_t y = x + 1; y < factors; ++y) {
      for (int value_x = 0; value_x < levels[x]; ++value_x) {
        for (int value_y = 0; value_y < levels[y]; ++value_y) open.insert({x, value_x, y, value_y});
      }
    }
  }
  std::vector<Row> rows;
  while (!open.empty()) {
    Row row(factors, unset);
    const auto [first, first_value, second, second_value] = *open.begin();
    open.erase(open.begin());
    row[first] = first_value;
    row[second] = second_value;
    if (!allowed(row)) continue;
    for (std::size_t x = 0; x < factors; ++x) {
      if (row[x] != unset) continue;
      std::size_t best_gain = 0;
      int best = unset;
      for (int step = 0; step < levels[x]; ++step) {
        // Ties go to a scattered choice, so that combinations of three and more vary too.
        const std::size_t scattered = (rows.size() * 40503 + x * 30011) % 65521 / 16;
        const int value =
            static_cast<int>((scattered + static_cast<std::size_t>(step)) % static_cast<std::size_t>(levels[x]));
        Row tried = row;
        tried[x] = value;
        if (!allowed(tried)) continue;
        const std::size_t value_gain = gain(open, row, x, value);
        if (best == unset || value_gain > best_gain) {
          best = value;
          best_gain = value_gain;
        }
      }
      row[x] = best;
      if (best == unset) break;
    }
    if (row.back() == unset) continue;
    for (std::size_t x = 0; x < factors; ++x) {
      for (std::size_t y = x + 1; y < factors; ++y) open.erase({x, row[x], y, row[y]});
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace tfla::test
