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

inline constexpr CpuRates cpu_forward_rates = {1.026e-11, 1.470e-10, 1.008e-11, 1.426e-07};
inline constexpr CpuRates cpu_backward_rates = {9.441e-12, 2.721e-10, 2.273e-10, 2.799e-07};

}  // namespace tfla
