// Forward on Hopper, schedule `factored`: O = P V, then O += Q C.
//
// O of a row is divided by qbar till the end. Q C then enters the sum as it is, and P is divided by qbar, which makes
// it S times abar / decay: a number per key, without exponentials. Where a token block decays by more than 2^-32, or
// gates above one leave that range, P is gated with exponentials and divided by qbar clamped to [2^-32, 2^32].
#pragma once

#include "cuda/sm90/forward/outputs/denominator.cuh"

namespace tfla::cuda::sm90::forward {

inline constexpr float least_unit = 0x1p-32F, most_unit = 0x1p32F;
__device__ __forceinline__ bool is_unit(float x) { return x >= least_unit && x <= most_unit; }
__device__ __forceinline__ float unit_of(float qbar) { return fminf(fmaxf(qbar, least_unit), most_unit); }

// abar / decay of this thread's keys.
__device__ __forceinline__ void read_weights(float (&weights)[16], float decay, unsigned gates, const Lane& lane) {
  const float inverse = __frcp_rn(decay);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 abar = arch::read_float2(gates + GateOffsets::abar + 4 * (8 * n + lane.pair));
    weights[2 * n] = abar.x * inverse;
    weights[2 * n + 1] = abar.y * inverse;
  }
}

// Whether P / qbar keeps its digits in float32. Gates are at most one, so qbar falls, to decay in the end. Only gates
// that are given as logarithms may be above one.
template <class C>
__device__ __forceinline__ bool are_in_range(const TokenBlock<C>& b, float decay, const float (&qbar)[2],
                                             const float (&weights)[16]) {
  if (!b.cta.call.rules.may_exceed_one) return decay >= least_unit;
  bool all = is_unit(decay) && is_unit(qbar[0]) && is_unit(qbar[1]);
#pragma unroll
  for (const float weight : weights) all = all && weight <= 0x1p64F;
  return arch::named_all(output_barrier + b.warpgroup, warpgroup_threads, all);
}

// Fallback: P, as it is gated, is divided by qbar clamped to [2^-32, 2^32], and the rows of Q are multiplied by qbar /
// clamped. Only the negligible state term is rounded once more.
__device__ __forceinline__ void set_units(float (&units)[2], Scores& s, float (&sums)[2], bool fresh) {
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    units[h] = fresh ? 1.0F : unit_of(units[h]);
    inverse[h] = __frcp_rn(units[h]);
    sums[h] *= inverse[h];
  }
#pragma unroll
  for (int e = 0; e < 32; ++e) s[e] *= inverse[e / 2 % 2];
}
template <class C>
__device__ __forceinline__ void scale_queries(const TokenBlock<C>& b) {
  using T = typename C::T;
#pragma unroll 1
  for (int x = 0; x < 4 * C::dqk_panels; ++x) {  // each warp its own rows: 64 columns of four at a time
    const int row = 16 * b.lane.warp + x % 4 * 4 + b.lane.lane / 8;
    const float qbar = arch::read_float(b.gates + GateOffsets::qbar + 4 * row), by = qbar / unit_of(qbar);
    if (by == 1) continue;
    const unsigned eight = b.q + x / 4 * panel_bytes + row * panel_row_bytes + b.lane.lane % 8 * 16;
    const uint4 q = arch::read_quad(eight);
    const auto scaled = [by](std::uint32_t pair) {
      const float2 two = arch::unpack(pair, T{});
      return arch::pack(float2{two.x * by, two.y * by}, T{});
    };
    arch::write_quad(eight, {scaled(q.x), scaled(q.y), scaled(q.z), scaled(q.w)});
  }
  arch::writes_before_copies();
  arch::named_wait(output_barrier + b.warpgroup, warpgroup_threads);
}

template <class C>
__device__ __forceinline__ void make_factored(const TokenBlock<C>& b, Outputs<C>& o, Rows<C>& rows) {
  static_assert(C::skips_fresh, "a fresh token block must have no state to wait for");
  Scores s;
  multiply_keys(b, s);
  arch::wait(b.cta.shared.v_full(b.ring.slot), b.ring.phase);
  const float decay = arch::read_float(b.gates + GateOffsets::decay);
  float weights[16], sums[2] = {0, 0}, qn[2] = {0, 0}, qn_columns[4];
  read_weights(weights, decay, b.gates, b.lane);
  arch::products_wait<0>();
  arch::pin(s);
  b.release_keys();

  read_rows(rows.unit, b.gates + GateOffsets::qbar, b.lane);
  if (are_in_range(b, decay, rows.unit, weights)) {
    weigh_scores(b, s, weights, sums);
  } else {
    float2 u[2];
    read_u(u, b.gates, b.lane);
    gate_scores(b, s, u, sums);
    set_units(rows.unit, s, sums, b.fresh);
    if (!b.fresh) scale_queries(b);
  }
  round_scores<C>(rows, s);

  multiply_values(b, o, rows, false);
  arch::products_wait<0>();
  arch::pin(o);
  if (!b.fresh) {
    if constexpr (C::n_in_state_product) {
#pragma unroll
      for (float& x : qn_columns) x = 0;
      arch::pin(qn_columns);
    }
    multiply_state(b, o, qn_columns);
    arch::products_wait<0>();
    arch::pin(o);
    if constexpr (C::n_in_state_product) {
      arch::pin(qn_columns);
      add_terms(qn, qn_columns);
    }
    b.release_state();
  }
  set_factors(b, rows, sums, qn, b.lane);
}

}  // namespace tfla::cuda::sm90::forward
