// The gates of the delta rule, for host and device: how much is written and what is kept, from what the caller gives,
// and the slopes of that. Templates on float or double. NaN stays NaN.
#pragma once

#include "core/gate_family.h"
#include "tfla/delta.h"

namespace tfla {

template <class Real>
TFLA_HOST_DEVICE Real write_strength(WriteGate gate, Real x) {
  if (gate == WriteGate::plain) return x;
  return gate == WriteGate::sigmoid ? sigmoid(x) : 2 * sigmoid(x);
}
// Its derivative by x.
template <class Real>
TFLA_HOST_DEVICE Real write_slope(WriteGate gate, Real x) {
  if (gate == WriteGate::plain) return 1;
  const Real slope = sigmoid(x) * sigmoid(-x);
  return gate == WriteGate::sigmoid ? slope : 2 * slope;
}

// A decay of minus infinity is a reset. A finite one resets just as well, and keeps sums of logarithms finite: exp of
// this is 0 in every type.
inline constexpr double least_log_decay = -800;
template <class Real>
TFLA_HOST_DEVICE bool is_reset(Real log_decay) {
  return log_decay <= static_cast<Real>(least_log_decay);
}
template <class Real>
TFLA_HOST_DEVICE Real limit_decay(Real log_decay) {
  return is_reset(log_decay) ? static_cast<Real>(least_log_decay) : log_decay;
}

}  // namespace tfla
