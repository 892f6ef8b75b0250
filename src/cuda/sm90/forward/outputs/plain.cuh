// Forward on Hopper, schedule `plain`: O = Q C, in flight while P is made; then O = qbar O + P V.
#pragma once

#include "cuda/sm90/forward/outputs/denominator.cuh"
#include "cuda/sm90/forward/outputs/row_sums.cuh"

namespace tfla::cuda::sm90::forward {

// P V is in flight; the factors are ready with it.
template <class C>
__device__ __forceinline__ void finish_plain(const TokenBlock<C>& b, Outputs<C>& o, Rows<C>& rows,
                                             const float (&sums)[2], const float (&qn)[2]) {
  if constexpr (C::n_in_state_product) set_factors(b, rows, sums, qn, b.lane);
  undo_scale16(rows);
  read_factors<0>(b, rows);
  arch::products_wait<0>();
  arch::pin(o);
}

template <class C>
__device__ __forceinline__ void make_plain_fresh(const TokenBlock<C>& b, Outputs<C>& o, Rows<C>& rows, const Scores& s,
                                                 const float (&sums)[2]) {
  const float qn[2] = {0, 0};
  make_rows<true>(b, rows, s, sums, qn, b.lane);
  if constexpr (!C::skips_fresh) {  // the state is handed over all the same, to be kept
    arch::wait(b.cta.shared.c_full(b.warpgroup), b.c_phase);
    b.release_state();
  }
  multiply_values(b, o, rows, false);
  finish_plain(b, o, rows, sums, qn);
}

template <class C>
__device__ __forceinline__ void make_plain_with_state(const TokenBlock<C>& b, Outputs<C>& o, Rows<C>& rows,
                                                      const Scores& s, const float (&sums)[2]) {
  float qn[2] = {0, 0}, qn_columns[4];
  multiply_state(b, o, qn_columns);
  if constexpr (C::qn_product == QnProduct::wgmma) {
    arch::products_wait<1>();
    arch::pin(qn_columns);
    add_terms(qn, qn_columns);
  } else if constexpr (C::qn_product == QnProduct::mma) {
    multiply_n(b, qn);
  }
  make_rows<false>(b, rows, s, sums, qn, b.lane);
  arch::products_wait<0>();
  arch::pin(o);
  if constexpr (C::qn_product == QnProduct::in_state_product) {
    arch::pin(qn_columns);
    add_terms(qn, qn_columns);
  }
  if (C::qn_product == QnProduct::mma || C::scaled) __syncwarp();  // all lanes have read n, and the scales
  b.release_state();
  weigh_outputs<C>(o, rows);
  multiply_values(b, o, rows, true);
  finish_plain(b, o, rows, sums, qn);
}

template <class C>
__device__ __forceinline__ void make_plain(const TokenBlock<C>& b, Outputs<C>& o, Rows<C>& rows) {
  Scores s;
  multiply_keys(b, s);
  arch::wait(b.cta.shared.v_full(b.ring.slot), b.ring.phase);
  float2 u[2];
  read_u(u, b.gates, b.lane);
  arch::products_wait<0>();
  arch::pin(s);
  b.release_keys();
  float sums[2] = {0, 0};
  gate_scores(b, s, u, sums);
  if (b.fresh)
    make_plain_fresh(b, o, rows, s, sums);
  else
    make_plain_with_state(b, o, rows, s, sums);
}

}  // namespace tfla::cuda::sm90::forward
