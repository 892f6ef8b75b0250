// Options with their defaults filled in.
#pragma once

#include <cmath>
#include <cstdint>

#include "tfla/mlstm.h"

namespace tfla {

// A max state of minus infinity, as an empty state may have, is read as this: differences to it are finite, and exp of
// them is zero. NaN stays.
inline constexpr double least_max_state = -1e6;
[[nodiscard]] inline double finite_max_state(double m) { return m < least_max_state ? least_max_state : m; }

struct Settings {
  bool exponential = true;  // input gate; the only one with a max state
  bool log_space = false;   // gates are given as log i and log f
  bool normalized = true;   // normalizer max
  bool exact = false;       // gradient through the denominator
  bool capped = false;
  double eps = 0;
  double scale = 1;  // of q
  double cap = 0;
};

// What options ask forward to keep, by the names of any version.
[[nodiscard]] inline Keep kept(const MlstmOptions& options) {
  if (options.keep == Keep::states || options.keep_states) return Keep::states;
  return options.keep_rows ? Keep::denominators : options.keep;
}

[[nodiscard]] inline Settings resolve(const MlstmOptions& options, std::int64_t dqk) {
  const bool exponential = options.gate == InputGate::exponential;
  const bool normalized =
      options.normalizer == Normalizer::automatic ? exponential : options.normalizer == Normalizer::max;
  return {.exponential = exponential,
          .log_space = options.gate == InputGate::log,
          .normalized = normalized,
          .exact = normalized && options.exact_normalizer_grad,
          .capped = options.soft_cap.has_value(),
          .eps = options.eps,
          .scale = options.qk_scale.value_or(1.0 / std::sqrt(static_cast<double>(dqk))),
          .cap = options.soft_cap.value_or(0.0)};
}

}  // namespace tfla
