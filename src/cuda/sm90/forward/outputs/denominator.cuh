// Forward on Hopper: q.n, the denominator, and what rows are multiplied by.
//
//   H = scale O / max(|scale d|, floor),   O = qbar Q C + P V,   d = qbar q.n + the sums of the rows of P
#pragma once

#include "cuda/sm90/forward/outputs/scores.cuh"

namespace tfla::cuda::sm90::forward {

// q.n of this thread's rows, in shares that add up over the row, from the eight columns of a product. Three of them
// hold the terms of n: this lane and its neighbours have those, and zeros.
__device__ __forceinline__ void add_terms(float (&qn)[2], const float (&columns)[4]) {
  qn[0] = columns[0] + columns[1];
  qn[1] = columns[2] + columns[3];
}
// The same by mma.sync: each warp multiplies its 16 rows of Q by the three terms of n.
template <class C>
__device__ __forceinline__ void multiply_n(const TokenBlock<C>& b, float (&qn)[2]) {
  using S = Shared<C>;
  float product[4] = {0, 0, 0, 0};
  const int term = b.lane.lane / 4;
  const unsigned from = b.cta.shared.n(b.warpgroup) + min(term, 2) * S::n_term + b.lane.pair * 4;
#pragma unroll
  for (int d = 0; d < 4 * C::dqk_panels; ++d) {
    uint32_t tiles[4];
    arch::load_tiles(tiles, (b.q + d / 4 * panel_bytes + b.lane.tile_row()) ^ (d % 4 * 32));
    uint2 column = arch::read_words(from + 32 * d);
    if (term > 2) column = {0, 0};
    arch::multiply_add(product, tiles, column.x, column.y, typename C::T{});
  }
  add_terms(qn, product);
}

// d of a row. sums, qn: this thread's shares.
template <class C>
__device__ __forceinline__ float denominator(const Rows<C>& rows, const float (&sums)[2], const float (&qn)[2], int h) {
  if constexpr (C::schedule == Schedule::factored)
    return rows.unit[h] * over_row(sums[h] + qn[h]);
  else
    return over_row(sums[h] + rows.n_weight[h] * qn[h]);
}

// factor *= 1 / max(|sum|, least), which is kept for backward with its slope.
template <class C>
__device__ __forceinline__ void divide(const TokenBlock<C>& b, float& factor, float sum, float least, float eps,
                                       const Lane& here, int h) {
  using S = Shared<C>;
  const float size = fabsf(sum);
  const float inverse = __fdividef(1, fmaxf(size, least) + eps);
  factor *= inverse;
  // A split state has no register for the question whether anything reads them.
  if ((C::split_state || b.cta.call.gates.inverse != nullptr) && here.pair == 0) {
    const unsigned row = b.cta.shared.denominators(b.ring.slot) + 4 * (here.row + 8 * h);
    arch::write_float(row + S::Denominators::inverse, inverse);
    arch::write_float(row + S::Denominators::slope, size > least ? copysignf(inverse, -sum) : 0.0F);
  }
}

// O is divided by `unit` where it is factored.
template <class C>
__device__ __forceinline__ float scale_of(const Rows<C>& rows, float scale, int h) {
  return C::schedule == Schedule::factored ? scale * rows.unit[h] : scale;
}

// scale / den of the rows. In gradients it is in the gates; the last part of dqk has it for both parts.
template <class C>
__device__ __forceinline__ void set_factors(const TokenBlock<C>& b, Rows<C>& rows, const float (&sums)[2],
                                            const float (&qn)[2], const Lane& here) {
  const float scale = b.scale(), eps = b.eps();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (C::reverse || C::grad_qk) {
      rows.factor[h] = 1;
    } else if constexpr (C::dqk_part == DqkPart::first) {
      rows.factor[h] = 1;
      if constexpr (C::normalized) rows.qn[h] = denominator<C>(rows, sums, qn, h);
    } else {
      rows.factor[h] = scale_of<C>(rows, scale, h);
      if constexpr (C::normalized) {
        const float least = arch::read_float(b.gates + GateOffsets::floor + 4 * (here.row + 8 * h));
        float d = denominator<C>(rows, sums, qn, h);
        if constexpr (C::dqk_part == DqkPart::last) d += rows.first_qn[h];
        divide(b, rows.factor[h], scale * d, least, eps, here, h);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void factor_weights(Rows<C>& rows) {
  if constexpr (!C::late_factors) {
    rows.weight[0] *= rows.factor[0];
    rows.weight[1] *= rows.factor[1];
  }
}

// The weights of Q C and q.n, and P as operands. Fresh: without a state.
template <bool Fresh, class C>
__device__ __forceinline__ void make_rows(const TokenBlock<C>& b, Rows<C>& rows, const Scores& s,
                                          const float (&sums)[2], const float (&qn)[2], const Lane& here) {
  float2 inverse_scales{1, 1};  // of Q C and q.n (float16)
  if constexpr (C::scaled) {
    if (!Fresh) inverse_scales = arch::read_float2(b.cta.shared.inverse_scales(b.warpgroup));
    scale_rows(s, rows.scale16);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float qbar = Fresh ? 0.0F : arch::read_float(b.gates + GateOffsets::qbar + 4 * (here.row + 8 * h));
    rows.weight[h] = C::scaled ? qbar * inverse_scales.x * rows.scale16[h] : qbar;
    rows.n_weight[h] = qbar * inverse_scales.y;
  }
  if constexpr (!C::n_in_state_product) set_factors(b, rows, sums, qn, here);
  factor_weights<C>(rows);
  round_scores<C>(rows, s);
}

// O *= the weights of Q C.
template <class C>
__device__ __forceinline__ void weigh_outputs(Outputs<C>& o, const Rows<C>& rows) {
#pragma unroll
  for (int e = 0; e < C::columns / 2; ++e) o[e] *= rows.weight[e / 2 % 2];
  arch::pin(o);
}

// float16: the factors undo the scale16 of P.
template <class C>
__device__ __forceinline__ void undo_scale16(Rows<C>& rows) {
  if constexpr (C::scaled) {
    rows.factor[0] *= inverse_power(rows.scale16[0]);
    rows.factor[1] *= inverse_power(rows.scale16[1]);
  }
}

}  // namespace tfla::cuda::sm90::forward
