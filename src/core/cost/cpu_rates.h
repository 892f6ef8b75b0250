// Written by benchmarks/cpu_ranges.py: the constants that fit docs/benchmarks/cpu_ranges.json best.
#pragma once

namespace tfla {

// Seconds on one core.
struct CpuRates {
  double flop;    // per operation of the matrix products
  double square;  // per element of a tile's square: exponentials, masks, sums
  double state;   // per byte of C and tile: passes over a state in cache
  double stored;  // per byte of C and chunk: states that go to memory and back
  double token;   // per byte of a token's rows
};

inline constexpr CpuRates cpu_forward_rates = {1.031e-11, 1.390e-09, 3.519e-11, 0, 0};
inline constexpr CpuRates cpu_backward_rates = {9.360e-12, 2.824e-09, 3.262e-10, 0, 0};

}  // namespace tfla
