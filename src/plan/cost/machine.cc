// Accelerators, time on them, and the chunk size that is best there.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checks.h"
#include "tfla/analysis.h"

namespace tfla::analysis {

const std::vector<Accelerator>& accelerators() {
  static const std::vector<Accelerator> known = {
      {"V100", 2017, 120e12, 0.9e12, "paper"},
      {"A100", 2020, 312e12, 1.935e12, "paper"},
      {"H100", 2022, 989e12, 3.35e12, "paper"},
      {"B200", 2025, 2250e12, 7.7e12, "paper"},
      // One 8192^3 bfloat16 product and one large copy on the device, 2026-11.
      {"H200", 2024, 790e12, 4.25e12, "measured"},
  };
  return known;
}

const Accelerator& accelerator(const std::string& name) {
  std::string names;
  for (const Accelerator& one : accelerators()) {
    if (one.name == name) return one;
    names += (names.empty() ? "" : ", ") + one.name;
  }
  refuse("tfla: accelerator is '" + name + "'; it must be one of " + names);
}

Runtime runtime(double flops, double bytes, const Accelerator& machine) {
  return {flops / machine.flops, bytes / machine.bandwidth};
}

double roofline(const Accelerator& machine, double intensity) {
  return std::min(machine.bandwidth * intensity, machine.flops);
}

double best_chunk(const Polynomial& count) { return std::sqrt(count.constant / count.quadratic); }

double best_chunk(const Polynomial& flops, const Polynomial& bytes, const Accelerator& machine) {
  return best_chunk((1 / machine.flops) * flops + (1 / machine.bandwidth) * bytes);
}

// Time is the larger of two curves: that of the bytes falls with L, that of the FLOPs has its valley at L_flop. Where
// the FLOPs already decide in their valley, that is the optimum; else it is where the rising branch meets the bytes.
double best_chunk_overlapped(const Polynomial& flops, const Polynomial& bytes, const Accelerator& machine) {
  const double valley = best_chunk(flops);
  const Polynomial excess = flops - machine.intensity() * bytes;
  if (excess(valley) >= 0) return valley;
  if (excess.quadratic <= 0) return std::numeric_limits<double>::infinity();
  const double half = excess.linear / (2 * excess.quadratic);
  return -half + std::sqrt(half * half - excess.constant / excess.quadratic);
}

double printed_flop_optimal_chunk(double dhv, double pqk, double causal) {
  return std::sqrt((2 * dhv * dhv * pqk + 5) / (2 * causal * (dhv * (1 + pqk) + 3) + 1));
}

double printed_runtime_optimal_chunk(double dhv, double pqk, double causal, double state_bytes, double intensity) {
  const double states = dhv * dhv * pqk;
  return std::sqrt((2 * states + 5 + 2 * intensity * states * state_bytes) / (2 * causal * (dhv * (1 + pqk) + 3) + 1));
}

// Golden-section search in the logarithm. The golden ratio to the power -80 is 2e-17 of the interval; a valley is only
// as sharp as the square root of the rounding of f.
double minimize(const std::function<double(double)>& f, double low, double high) {
  constexpr double ratio = 0.6180339887498949;
  constexpr int steps = 80;
  double a = std::log(low);
  double b = std::log(high);
  double x = b - ratio * (b - a);
  double y = a + ratio * (b - a);
  double fx = f(std::exp(x));
  double fy = f(std::exp(y));
  for (int step = 0; step < steps; ++step) {
    if (fx <= fy) {
      b = y;
      y = x;
      fy = fx;
      x = b - ratio * (b - a);
      fx = f(std::exp(x));
    } else {
      a = x;
      x = y;
      fx = fy;
      y = a + ratio * (b - a);
      fy = f(std::exp(y));
    }
  }
  return std::exp((a + b) / 2);
}

double nearest_power_of_two(double x) { return std::exp2(std::round(std::log2(x))); }

}  // namespace tfla::analysis
