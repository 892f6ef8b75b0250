// Forward on Hopper: one token block of an output warpgroup, and its products.
#pragma once

#include "cuda/sm90/forward/cta.cuh"

namespace tfla::cuda::sm90::forward {

template <class C>
struct TokenBlock {
  const Cta<C>& cta;
  int warpgroup;
  Lane lane;
  typename Cta<C>::Slots ring;  // Q, V and gates; H goes where Q was
  typename Cta<C>::KeySlots k;
  unsigned c_phase;
  bool fresh;  // C = 0 and n = 0: see Config::skips_fresh
  const typename Cta<C>::Item& item;
  int number;  // of the sequence's
  unsigned q, gates;

  // The lane, computed anew where registers are short.
  __device__ __forceinline__ Lane here() const { return C::split_state ? Lane::again() : lane; }

  // Read where they take no registers.
  __device__ __forceinline__ float scale() const {
    return C::few_registers ? cta.work.scale : static_cast<float>(cta.call.rules.scale);
  }
  __device__ __forceinline__ float eps() const {
    return C::few_registers ? cta.work.eps : static_cast<float>(cta.call.rules.eps);
  }

  __device__ __forceinline__ void release_keys() const {
#pragma unroll
    for (int p = 0; p < C::parts; ++p)
      if (arch::arrives(here().lane == 0)) arch::arrive(cta.shared.k_empty(k.after(p).slot));
  }
  __device__ __forceinline__ void release_state() const {
    if (arch::arrives(here().lane == 0)) arch::arrive(cta.shared.c_empty());
  }
  // The parts of Q that H does not leave through.
  __device__ __forceinline__ void release_queries() const {
#pragma unroll
    for (int p = 1; p < C::parts; ++p)
      if (arch::arrives(here().lane == 0)) arch::arrive(cta.shared.q_empty(ring.slot, p));
  }
};

// dQ and dK: of two rows of q or k what a thread has of O, in two halves, and the products with O.
template <class C>
struct RowFactors {
  static constexpr int eights = C::columns / 16;
  std::uint32_t pairs[2][eights][2];
  float sums[2];
};
struct NoFactors {};

// What a thread knows of its two rows, and their P as operands.
template <class C>
struct Rows {
  float factor[2];    // scale / den: multiplies O, or P and weight
  float weight[2];    // of Q C: qbar
  float n_weight[2];  // of q.n
  float unit[2];      // factored: O is divided by it
  float scale16[2];   // of P (float16)
  float qn[2];        // what the first part of dqk leaves for the last: qbar q.n + sum P
  float first_qn[2];  // the same, as the last one reads it
  uint32_t high[4][4], low[C::split_steps > 0 ? C::split_steps : 1][4];  // P, and what its rounding left
  std::conditional_t<C::grad_qk, RowFactors<C>, NoFactors> factors;
};

template <class C>
using Outputs = float[C::columns / 2];  // O, as wgmma holds it
using Scores = float[32];               // S, then P

// Steps of descriptors, which count 16 bytes: to the next panel of 64 columns of an operand along the depth, to its
// next 16 columns, to the next 16 tokens of one across the depth.
inline constexpr int panel_step = panel_bytes / 16, depth_step = 16 * 2 / 16, token_step = 16 * panel_row_bytes / 16;
__device__ __forceinline__ constexpr int depth_offset(int d) { return d / 4 * panel_step + d % 4 * depth_step; }

// S = Q K^T, in flight on return.
template <class C>
__device__ __forceinline__ void multiply_keys(const TokenBlock<C>& b, Scores& s) {
  using arch::Major;
  const Shared<C>& shared = b.cta.shared;
#pragma unroll
  for (int p = 0; p < C::parts; ++p) {
    const auto part = b.k.after(p);
    arch::wait(shared.q_full(b.ring.slot, p), b.ring.phase);
    arch::wait(shared.k_full(part.slot), part.phase);
  }
  const std::uint64_t q = arch::tile_descriptor(b.q);
  arch::products_begin();
#pragma unroll
  for (int p = 0; p < C::parts; ++p) {
    const std::uint64_t k = arch::tile_descriptor(shared.k(b.k.after(p).slot));
#pragma unroll
    for (int d = 0; d < 4 * C::part_panels; ++d)
      arch::multiply<typename C::T, Major::depth, Major::depth>(
          s, q + p * (Shared<C>::part_bytes / 16) + depth_offset(d), k + depth_offset(d), p + d > 0);
  }
  arch::products_commit();
}

// O (+)= Q C, in flight on return, and q.n where a product makes it: with Q C, or in a batch of its own before it.
template <class C>
__device__ __forceinline__ void multiply_state(const TokenBlock<C>& b, Outputs<C>& o, float (&qn_columns)[4]) {
  using arch::Major;
  using T = typename C::T;
  const Shared<C>& shared = b.cta.shared;
  constexpr bool groups = C::n_in_state_product, adds = C::schedule == Schedule::factored;
  arch::wait(shared.c_full(b.warpgroup), b.c_phase);
  const std::uint64_t q = arch::tile_descriptor(b.q);
  const std::uint64_t state = groups ? arch::groups_descriptor(shared.state(), Shared<C>::group_bytes)
                                     : arch::tile_descriptor(shared.state(), C::dqk_panels * panel_bytes);
  constexpr int state_step = groups ? 16 : token_step;  // to the next 16 rows of C
  arch::products_begin();
  if constexpr (C::qn_product == QnProduct::wgmma) {
    const std::uint64_t n = arch::tile_descriptor(shared.n(b.warpgroup));
#pragma unroll
    for (int d = 0; d < 4 * C::dqk_panels; ++d)
      arch::multiply<T, Major::depth, Major::depth>(qn_columns, q + depth_offset(d),
                                                    n + d / 4 * (Shared<C>::n_panel / 16) + d % 4 * depth_step, d > 0);
    arch::products_commit();
  }
#pragma unroll
  for (int d = 0; d < 4 * C::dqk_panels; ++d) {
    if constexpr (groups)
      arch::multiply<T, Major::depth, Major::across>(o, qn_columns, q + depth_offset(d), state + d * state_step,
                                                     adds || d > 0);
    else
      arch::multiply<T, Major::depth, Major::across>(o, q + depth_offset(d), state + d * state_step, adds || d > 0);
  }
  arch::products_commit();
}

// O (+)= P V, in flight on return.
template <class C>
__device__ __forceinline__ void multiply_values(const TokenBlock<C>& b, Outputs<C>& o, const Rows<C>& rows, bool add) {
  using T = typename C::T;
  constexpr auto across = arch::Major::across;
  const std::uint64_t values = arch::tile_descriptor(b.cta.shared.v(b.ring.slot), panel_bytes);
  arch::products_begin();
#pragma unroll
  for (int t = 0; t < 4; ++t) arch::multiply<T, across>(o, rows.high[t], values + t * token_step, add || t > 0);
#pragma unroll
  for (int t = 0; t < C::split_steps; ++t) arch::multiply<T, across>(o, rows.low[t], values + t * token_step, true);
  arch::products_commit();
}

}  // namespace tfla::cuda::sm90::forward
