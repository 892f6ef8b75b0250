// The vectors of tokens that every matrix kernel reads.
#pragma once

#include "cuda/gates/scan.cuh"

namespace tfla::cuda::gates {

// exp(x). float32 work does not need all digits of a double: with exp(double) gate_vectors took 35 us, not 22 (H200).
__device__ __forceinline__ double exponential(double x, double /*as*/) { return exp(x); }
__device__ __forceinline__ float exponential(double x, float /*as*/) {
  float2 parts;
  as_exponent(x, parts);
  return exp2f(parts.x) * (1 + static_cast<float>(1 / log2_e) * parts.y);
}

// The max state before and after a chunk, and the sum of its log f.
struct ChunkEnds {
  double m_start, m_end, b_last;
};

// Writes value_of(t) of a lane's tokens, in pieces of 16 bytes if they are `whole` and begin on such a piece.
template <class V, class ValueOf>
__device__ __forceinline__ void write_tokens(V* to, int tokens, bool whole, const ValueOf& value_of) {
  V x[lane_tokens];
#pragma unroll
  for (int t = 0; t < lane_tokens; ++t) x[t] = value_of(t);
  constexpr int pieces = static_cast<int>(sizeof(x) / sizeof(float4));
  if (whole) {
    float4 piece[pieces];
    memcpy(piece, x, sizeof(x));
#pragma unroll
    for (int p = 0; p < pieces; ++p) reinterpret_cast<float4*>(to)[p] = piece[p];
    return;
  }
#pragma unroll
  for (int t = 0; t < lane_tokens; ++t)
    if (t < tokens) to[t] = x[t];
}

// Writes the vectors of a lane's tokens, which begin at `at`.
template <class Real>
__device__ __forceinline__ void write_vectors(const Call<Real>& call, std::int64_t at, int tokens,
                                              const ChunkEnds& ends, const LaneScan& scan) {
  using Log = Log<Real>;
  if (tokens <= 0) return;
  const bool whole = tokens >= lane_tokens && at % lane_tokens == 0;
  const auto write = [&](auto* to, const auto& value_of) { write_tokens(to + at, tokens, whole, value_of); };
  const auto exponent = [](double x) {
    Log log;
    as_exponent(x, log);
    return log;
  };
  double u[lane_tokens];  // b - m, without the rounding of that difference
#pragma unroll
  for (int t = 0; t < lane_tokens; ++t)
    u[t] = call.rules.family.has_max_state ? -fmax(ends.m_start, scan.top[t]) : scan.b[t];
  write(call.gates.u, [&](int t) { return exponent(u[t]); });
  write(call.gates.log_c, [&](int t) { return exponent(scan.c[t]); });
  write(call.gates.qbar, [&](int t) { return exponential(u[t] + ends.m_start, Real{}); });
  write(call.gates.abar, [&](int t) { return exponential(ends.b_last + scan.c[t] - ends.m_end, Real{}); });
  // Backward has denominators from forward, or makes them. Forward may have nobody to keep them for.
  if (!call.rules.normalized && call.tensors.h.data != nullptr && call.gates.inverse != nullptr) {
    write(call.gates.inverse, [](int) { return Real{1}; });
    write(call.gates.slope, [](int) { return Real{0}; });
  }
  if (call.rules.normalized && call.gates.floor != nullptr)
    write(call.gates.floor, [&](int t) { return exponential(u[t] - scan.b[t], Real{}); });
  if (call.gates.c != nullptr) write(call.gates.c, [&](int t) { return scan.c[t]; });
}

}  // namespace tfla::cuda::gates
