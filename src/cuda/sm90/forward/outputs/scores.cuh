// Forward on Hopper: S becomes P.
#pragma once

#include "cuda/arch/math.cuh"
#include "cuda/sm90/forward/outputs/token_block.cuh"

namespace tfla::cuda::sm90::forward {

// Calls visit(n, masked) for eight keys at a time. Steps of 16 keys right of a warp's rows are masked whole; in reverse
// time, where rows are keys and columns queries, those left of them.
template <class C, class Visit>
__device__ __forceinline__ void each_part(Scores& s, const Lane& lane, const Visit& visit) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    if (C::reverse ? part > lane.warp : part < lane.warp) {
      visit(2 * part, false);
      visit(2 * part + 1, false);
    } else if (part == lane.warp) {
      visit(2 * part, true);
      visit(2 * part + 1, true);
    } else {
#pragma unroll
      for (int e = 8 * part; e < 8 * part + 8; ++e) s[e] = 0;
    }
  }
}
template <class C>
__device__ __forceinline__ void mask_and_sum(float& score, int n, int e, bool masked, const Lane& lane,
                                             float (&sums)[2]) {
  const int row = lane.row % 16 + e / 2 * 8, column = 8 * (n % 2) + lane.pair + e % 2;
  if (masked && (C::reverse ? column < row : column > row)) score = 0;
  if (C::normalized) sums[e / 2] += score;
}

__device__ __forceinline__ void read_rows(float (&rows)[2], unsigned vector, const Lane& lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) rows[h] = arch::read_float(vector + 4 * (lane.row + 8 * h));
}
__device__ __forceinline__ void read_u(float2 (&u)[2], unsigned gates, const Lane& lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) u[h] = arch::read_float2(gates + GateOffsets::u + 8 * (lane.row + 8 * h));
}

// P = S exp2(u + c), masked, and the sums of this thread's share of its rows.
template <class C>
__device__ __forceinline__ void gate_scores(const TokenBlock<C>& b, Scores& s, const float2 (&u)[2], float (&sums)[2]) {
  each_part<C>(s, b.lane, [&](int n, bool masked) {
    const float4 c = arch::read_float4(b.gates + GateOffsets::c + 8 * (8 * n + b.lane.pair));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int h = e / 2;
      const float exponent = (u[h].x + (e % 2 ? c.z : c.x)) + (u[h].y + (e % 2 ? c.w : c.y));
      s[4 * n + e] *= arch::exp2(exponent);
      mask_and_sum<C>(s[4 * n + e], n, e, masked, b.lane, sums);
    }
  });
}
// The same by a weight per key.
template <class C>
__device__ __forceinline__ void weigh_scores(const TokenBlock<C>& b, Scores& s, const float (&weights)[16],
                                             float (&sums)[2]) {
  each_part<C>(s, b.lane, [&](int n, bool masked) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[4 * n + e] *= weights[2 * n + e % 2];
      mask_and_sum<C>(s[4 * n + e], n, e, masked, b.lane, sums);
    }
  });
}

// P as operands of P V. P of the first 16 keys of a token block, which all of its rows see, is the sum of two bfloat16:
// its rounding would be half of the error of H. Two terms for all keys took 10 % longer.
template <class C>
__device__ __forceinline__ void round_scores(Rows<C>& rows, const Scores& s) {
  using T = typename C::T;
#pragma unroll
  for (int e = 0; e < 32; e += 2) {
    const float by = C::scaled ? rows.scale16[e / 2 % 2] : C::late_factors ? 1.0F : rows.factor[e / 2 % 2];
    const float2 value{s[e] * by, s[e + 1] * by};
    if (e / 8 < C::split_steps)
      rows.high[e / 8][e / 2 % 4] = split<T>(value, rows.low[e / 8][e / 2 % 4]);
    else
      rows.high[e / 8][e / 2 % 4] = arch::pack(value, T{});
  }
}

// float16: the scale16 of P of each row, whose keys four lanes have.
__device__ __forceinline__ void scale_rows(const Scores& s, float (&scale16)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = 0;
#pragma unroll
    for (int e = 0; e < 32; e += 4) largest = fmaxf(largest, fmaxf(fabsf(s[e + 2 * h]), fabsf(s[e + 2 * h + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 2));
    scale16[h] = scale16_to(largest, top_of_scores, -60, 40);
  }
}

}  // namespace tfla::cuda::sm90::forward
