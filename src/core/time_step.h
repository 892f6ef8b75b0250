// The time step of the state space dual, for host and device: from what the caller gives, and its slope.
#pragma once

#include "core/gate_family.h"

namespace tfla {

// dt = min(max(x, least), most) of x, or of softplus(x).
template <class Real>
struct TimeStepRule {
  bool softplus;
  Real least, most;

  [[nodiscard]] TFLA_HOST_DEVICE Real value(Real x) const {
    const Real dt = softplus ? tfla::softplus(x) : x;
    return dt < least ? least : dt > most ? most : dt;  // NaN stays
  }
  [[nodiscard]] TFLA_HOST_DEVICE Real slope(Real x) const {
    const Real dt = softplus ? tfla::softplus(x) : x;
    if (dt < least || dt > most) return 0;
    return softplus ? sigmoid(x) : Real{1};
  }
};

// Below the last digit of any other dt: with it a dt of 0 has a logarithm, and a gradient.
inline constexpr double least_time_step = 1e-30;

}  // namespace tfla
