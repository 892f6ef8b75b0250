// Forward on Hopper, schedule `wide`, for split states: O = Q C, in flight while the scores are gated and P is made;
// then O = qbar O + P V. One output warpgroup has all token blocks, and no branch: products must not end in one.
#pragma once

#include "cuda/sm90/forward/outputs/denominator.cuh"
#include "cuda/sm90/forward/outputs/row_sums.cuh"
#include "cuda/sm90/forward/outputs/split_dqk.cuh"

namespace tfla::cuda::sm90::forward {

// P V is in flight. The last part of dqk adds the O of the first.
template <class C>
__device__ __forceinline__ void finish_wide(const TokenBlock<C>& b, Outputs<C>& o, Rows<C>& rows) {
  undo_scale16(rows);
  OPiece<C> first;
  if constexpr (C::dqk_part == DqkPart::last) first.read(b, 0);
  read_factors<0>(b, rows);
  arch::products_wait<0>();
  arch::pin(o);
  if constexpr (C::dqk_part == DqkPart::last) {
#pragma unroll
    for (int piece = 0; piece < OPiece<C>::count; ++piece) {
      if (piece > 0) first.read(b, piece);
      first.add_to(o, rows.factor, piece);
    }
  }
}

template <class C>
__device__ __forceinline__ void make_wide(const TokenBlock<C>& b, Outputs<C>& o, Rows<C>& rows) {
  Scores s;
  float qn[2] = {0, 0}, qn_columns[4];
  multiply_keys(b, s);
  multiply_state(b, o, qn_columns);
  arch::wait(b.cta.shared.v_full(b.ring.slot), b.ring.phase);
  float2 u[2];
  read_u(u, b.gates, b.lane);
  arch::products_wait<C::normalized ? 2 : 1>();
  arch::pin(s);
  b.release_keys();
  float sums[2] = {0, 0};
  if constexpr (C::dqk_part == DqkPart::last && C::normalized) read_first_qn(b, rows);
  gate_scores(b, s, u, sums);
  if constexpr (C::normalized) {
    arch::products_wait<1>();
    arch::pin(qn_columns);
    add_terms(qn, qn_columns);
  }
  make_rows<false>(b, rows, s, sums, qn, b.here());
  arch::products_wait<0>();
  arch::pin(o);
  if (C::scaled) __syncwarp();  // all lanes have read the scales
  b.release_state();
  b.release_queries();
  weigh_outputs<C>(o, rows);
  multiply_values(b, o, rows, true);
  finish_wide(b, o, rows);
}

}  // namespace tfla::cuda::sm90::forward
