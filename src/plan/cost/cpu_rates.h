// Written by benchmarks/cpu/ranges.py: the constants that fit docs/benchmarks/cpu_ranges.json best.
#pragma once

namespace tfla {

// Seconds on one core.
struct CpuRates {
  double flop;    // per operation of the matrix products
  double square;  // per element of a tile's square: exponentials, masks, sums
  double state;   // per byte of C and tile: passes over the state
  double row;     // per token: gates
};

inline constexpr CpuRates cpu_forward_rates = {9.185e-12, 0.000e+00, 2.223e-11, 2.104e-07};
inline constexpr CpuRates cpu_backward_rates = {8.860e-12, 3.143e-10, 3.913e-10, 3.999e-07};

}  // namespace tfla
