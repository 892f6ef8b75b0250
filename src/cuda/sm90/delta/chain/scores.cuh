// Kernels along the chain of states: the warpgroup of the scores, P_tj = scale D_tj q_t.k_j for j <= t, for outputs
// times beta_j.
#pragma once

#include "cuda/arch/mma.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/delta/chain/cta.cuh"

namespace tfla::cuda::sm90::delta_rule {

template <class C>
__device__ __forceinline__ void multiply_queries(float (&scores)[32], unsigned q, unsigned k) {
  arch::products_begin();
#pragma unroll
  for (int step = 0; step < 4 * C::key_panels; ++step) {
    const unsigned offset = step / 4 * panel_bytes + step % 4 * 32;
    arch::multiply<T, Major::depth, Major::depth>(scores, arch::tile_at(q, offset), arch::tile_at(k, offset), step > 0);
  }
  arch::products_commit();
  arch::products_wait<0>();
  arch::pin(scores);
}

template <Vector Key>
__device__ __forceinline__ void gate_scores(float (&scores)[32], const SolvedTile& solved, const Lane& lane) {
  const TokenPair own(lane);
  const float sum[2] = {solved.one(Vector::sum, lane.row), solved.one(Vector::sum, lane.row + 8)};
  const float query[2] = {solved.one(Vector::query, lane.row), solved.one(Vector::query, lane.row + 8)};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int j = 8 * n + lane.pair;
    const float2 sums = solved.pair(Vector::sum, n, own), keys = solved.pair(Key, n, own);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = lane.row + 8 * r, at = 4 * n + 2 * r;
      const float x = scores[at] * arch::exp2(sum[r] - sums.x) * query[r] * keys.x;
      const float y = scores[at + 1] * arch::exp2(sum[r] - sums.y) * query[r] * keys.y;
      scores[at] = j <= t ? x : 0.0F;
      scores[at + 1] = j + 1 <= t ? y : 0.0F;
    }
  }
}

template <class C>
__device__ __forceinline__ void make_scores(const ChainItem<C>& item) {
  using Shared = ChainShared<C>;
  const Shared& shared = item.shared;
  const Lane lane;
  Ring<C::slots> ring;
  Ring<Shared::score_slots> out;
#pragma unroll 1
  for (int tile = 0; tile < item.tiles; ++tile, ring.advance(), out.advance()) {
    const unsigned slot = shared.slot(ring.slot);
    arch::wait(shared.full(ring.slot), ring.phase);
    float scores[32];
    multiply_queries<C>(scores, slot + Shared::q, slot + Shared::k);
    gate_scores<C::reverse ? Vector::norm : Vector::key>(scores, {slot + Shared::solved}, lane);
    arch::wait(shared.taken(out.slot), out.phase ^ 1);
    const unsigned row = shared.score_slot(out.slot) + lane.tile_row();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto pack = [&](int x) { return arch::round_pair({scores[8 * n + 2 * x], scores[8 * n + 2 * x + 1]}); };
      arch::store_tiles(row ^ (n << 5), pack(0), pack(1), pack(2), pack(3));
    }
    arch::writes_before_copies();
    __syncwarp();
    if (lane.leads()) {
      arch::arrive(shared.scored(out.slot));
      arch::arrive(shared.empty(ring.slot));
    }
  }
}

}  // namespace tfla::cuda::sm90::delta_rule
