// Written by benchmarks/cpu_ranges.py: the constants that fit docs/benchmarks/cpu_ranges.json best.
#pragma once

namespace tfla {

// Seconds on one core.
struct CpuRates {
  double flop;    // per operation of the matrix products
  double square;  // per element of a tile's square: exponentials, masks, sums
  double state;   // per byte of C and tile: passes over the state
  double row;     // per token: gates
};

inline constexpr CpuRates cpu_forward_rates = {1.105e-11, 0.000e+00, 3.345e-12, 1.485e-07};
inline constexpr CpuRates cpu_backward_rates = {1.086e-11, 1.088e-10, 2.466e-10, 2.630e-07};

}  // namespace tfla
