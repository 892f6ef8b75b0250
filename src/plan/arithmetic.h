// Whole numbers of whole numbers.
#pragma once

#include <bit>
#include <cstdint>

namespace tfla {

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
[[nodiscard]] constexpr std::int64_t round_up(std::int64_t a, std::int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}
[[nodiscard]] constexpr std::int64_t power_of_two_above(std::int64_t a) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(a)));
}

}  // namespace tfla
