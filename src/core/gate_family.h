// The gate families, for host and device: how raw gates become log f and log i, the slopes of that, and what the rest
// of the library has to know of a family. A family is one row of `gate_table`; a gate function that no row has yet is
// a value of GateLog with its two cases below, and one in cpu/stages/gates.cc, which works on vectors.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tfla/mlstm.h"

#ifdef __CUDACC__
#define TFLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TFLA_HOST_DEVICE inline
#endif

namespace tfla {

// The logarithm of a gate as a function of what the caller gives, after the soft cap.
enum class GateLog : std::uint8_t {
  log_sigmoid,  // the gate is sigmoid(x)
  identity      // the gate is exp(x)
};

// One byte: a kernel has all of it in one word of its arguments.
struct GateFamily {
  GateLog forget : 2;
  GateLog input : 2;
  // States are kept in the scale exp(m) of a running maximum, so that i may have any size. Other families have m = 0.
  bool has_max_state : 1 = false;
  bool may_exceed_one : 1 = false;  // f may, and the weight of a state may grow
  bool normalized : 1 = false;      // what Normalizer::automatic means
};
static_assert(sizeof(GateFamily) == 1);

struct GateRow {
  InputGate gate;
  const char* name;        // as mlstm.h spells it
  const char* short_name;  // the paper's, short enough for a table
  GateFamily family;
};

// In the order of InputGate.
inline constexpr auto gate_table = std::to_array<GateRow>({
    {.gate = InputGate::exponential,
     .name = "exponential",
     .short_name = "exp",
     .family =
         GateFamily{
             .forget = GateLog::log_sigmoid, .input = GateLog::identity, .has_max_state = true, .normalized = true}},
    {.gate = InputGate::sigmoid,
     .name = "sigmoid",
     .short_name = "sig",
     .family = GateFamily{.forget = GateLog::log_sigmoid, .input = GateLog::log_sigmoid}},
    {.gate = InputGate::log,
     .name = "log",
     .short_name = "log",
     .family = GateFamily{.forget = GateLog::identity, .input = GateLog::identity, .may_exceed_one = true}},
});
static_assert([] {
  std::size_t row = 0;
  for (const GateRow& known : gate_table)
    if (static_cast<std::size_t>(known.gate) != row++) return false;
  return true;
}());

[[nodiscard]] constexpr bool is_known(InputGate gate) { return static_cast<std::size_t>(gate) < gate_table.size(); }

[[nodiscard]] constexpr GateFamily gate_family(InputGate gate) {
  return gate_table.at(static_cast<std::size_t>(gate)).family;  // checked arguments have no other gate
}

// ---------------------------------------------------------------- gate functions
// Templates on float or double. NaN stays NaN.

template <class Real>
TFLA_HOST_DEVICE Real sigmoid(Real x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

template <class Real>
TFLA_HOST_DEVICE Real log_sigmoid(Real x) {
  return std::fmin(x, Real{0}) - std::log1p(std::exp(-std::fabs(x)));
}

template <class Real>
TFLA_HOST_DEVICE Real softplus(Real x) {
  return -log_sigmoid(-x);
}

template <class Real>
TFLA_HOST_DEVICE Real soft_cap(Real cap, Real x) {
  return cap * std::tanh(x / cap);
}

// A gate's logarithm, and its derivative by x.
template <class Real>
TFLA_HOST_DEVICE Real log_gate(GateLog log, Real x) {
  return log == GateLog::log_sigmoid ? log_sigmoid(x) : x;
}
template <class Real>
TFLA_HOST_DEVICE Real log_gate_slope(GateLog log, Real x) {
  return log == GateLog::log_sigmoid ? sigmoid(-x) : Real{1};
}

// Derivative of log_gate(soft_cap(x)) by the raw gate x; without the cap if not `capped`.
template <class Real>
TFLA_HOST_DEVICE Real raw_gate_slope(GateLog log, bool capped, Real cap, Real x) {
  const Real t = capped ? std::tanh(x / cap) : Real{0};
  return (1 - t * t) * log_gate_slope(log, capped ? cap * t : x);
}

// ---------------------------------------------------------------- limits

// A forget gate of minus infinity is a full reset. A finite log f closes the gate just as well, and keeps sums finite.
// The backends place this limit differently:
// - The CPU has the gates of a whole sequence, in double. It puts the limit 800 below all that input gates and the
//   initial state can make up for, where exp is 0, and so keeps the digits of the sums that log f enters.
// - A kernel sees one chunk or one token. It takes the same limit everywhere, which serves input gates up to 1e4 in
//   size.
inline constexpr double reset_margin = 800;
inline constexpr double reset_log_forget = -3e4;

// log f of the GPU, with its limit.
template <class Real>
TFLA_HOST_DEVICE Real limit_reset(Real log_f) {
  constexpr auto least = static_cast<Real>(reset_log_forget);
  return log_f < least ? least : log_f;
}

// A max state of minus infinity, as an empty state may have, is read as this: differences to it are finite, and exp of
// them is zero. NaN stays.
inline constexpr double least_max_state = -1e6;
template <class Real>
TFLA_HOST_DEVICE Real finite_max_state(Real m) {
  constexpr auto least = static_cast<Real>(least_max_state);
  return m < least ? least : m;
}

}  // namespace tfla
