#include "reference/regimes.h"

#include <cmath>
#include <numbers>

namespace tfla::reference {
namespace {

// In (0, 1): never 0, so that its logarithm is finite.
double uniform(std::uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

double spread_over_heads(std::int64_t head, std::int64_t heads) {
  return heads == 1 ? 3.0 : 3.0 + 3.0 * static_cast<double>(head) / static_cast<double>(heads - 1);
}

}  // namespace

const char* name(Regime regime) {
  switch (regime) {
    case Regime::randn: return "randn";
    case Regime::init: return "init";
    case Regime::trained_like: return "trained_like";
    case Regime::large_i: return "large_i";
    case Regime::capped_extremes: return "capped_extremes";
    case Regime::never_forget: return "never_forget";
    case Regime::resets: return "resets";
  }
  return "unknown";
}

std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9U;
  value = (value ^ value >> 27) * 0x94D049BB133111EBU;
  return value ^ value >> 31;
}

double normal(std::uint64_t seed, Stream stream, std::int64_t index) {
  const std::uint64_t key = mix(mix(seed) + static_cast<std::uint64_t>(stream));
  const std::uint64_t first = mix(key + 2 * static_cast<std::uint64_t>(index));
  const std::uint64_t second = mix(key + 2 * static_cast<std::uint64_t>(index) + 1);
  return std::sqrt(-2 * std::log(uniform(first))) * std::cos(2 * std::numbers::pi * uniform(second));
}

double input_gate(Regime regime, double noise) {
  switch (regime) {
    case Regime::randn: return noise;
    case Regime::init: return -10 + 0.3 * noise;
    case Regime::trained_like: return -4 + 3 * noise;
    case Regime::large_i: return 10 + 3 * noise;
    case Regime::capped_extremes: return 15 * std::tanh(20 * noise / 15);
    case Regime::never_forget:
    case Regime::resets: return -2 + noise;
  }
  return noise;
}

double forget_gate(Regime regime, double noise, std::int64_t token, std::int64_t head, std::int64_t heads) {
  switch (regime) {
    case Regime::randn: return noise;
    case Regime::init: return spread_over_heads(head, heads) + 0.3 * noise;
    case Regime::trained_like: return spread_over_heads(head, heads) + 2 * noise;
    case Regime::large_i: return 4 + 2 * noise;
    case Regime::capped_extremes: return 15 * std::tanh(20 * noise / 15);
    case Regime::never_forget: return 12 + noise;
    case Regime::resets: return (token + 1) % 97 == 0 ? -25 : spread_over_heads(head, heads) + noise;
  }
  return noise;
}

double float16_scale(Regime regime) {
  switch (regime) {
    case Regime::init: return 16;
    case Regime::trained_like: return 4;
    case Regime::never_forget: return 8;
    case Regime::large_i: return 1.0 / 16;
    default: return 1;
  }
}

}  // namespace tfla::reference
