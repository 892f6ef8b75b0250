// Options with their defaults filled in.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/gate_family.h"
#include "tfla/mlstm.h"

namespace tfla {

struct Settings {
  GateFamily family = gate_family(InputGate::exponential);
  bool normalized = true;  // normalizer max
  bool exact = false;      // gradient through the denominator
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
  const GateFamily family = gate_family(options.gate);
  const bool normalized =
      options.normalizer == Normalizer::automatic ? family.normalized : options.normalizer == Normalizer::max;
  return {.family = family,
          .normalized = normalized,
          .exact = normalized && options.exact_normalizer_grad,
          .capped = options.soft_cap.has_value(),
          .eps = options.eps,
          .scale = options.qk_scale.value_or(1.0 / std::sqrt(static_cast<double>(dqk))),
          .cap = options.soft_cap.value_or(0.0)};
}

}  // namespace tfla
