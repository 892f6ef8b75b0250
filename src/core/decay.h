// What one token leaves of a state.
#pragma once

namespace tfla {

// As the sum of 1 or 0 and a rest, so that a forget gate near one keeps its digits: 1 - sigmoid(12) is 6e-6, which is
// rounded by half a percent where float32 numbers lie 6e-8 apart, and a thousand steps add that up.
template <class Real>
struct Decay {
  Real whole, rest;

  // Where its logarithm is no larger than this it is 1 and a rest. Others are forgotten before errors add up.
  static constexpr double near_one = 0.125;
};

}  // namespace tfla
