// tfla check --random: random calls of every kind, judged by what rounding explains.
#pragma once

#include <cstdint>
#include <string>

#include "tfla/tfla.h"

namespace tfla::cli {

// Draws `count` calls from `seed` on and prints those whose error roundings do not explain. Returns the exit code.
[[nodiscard]] int check_random(std::int64_t count, std::uint64_t seed, const Execution& execution,
                               const std::string& json);

}  // namespace tfla::cli
