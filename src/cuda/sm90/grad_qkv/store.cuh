// grad_qkv: the thread that stores. It has 24 registers.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_qkv/shared.cuh"

namespace tfla::cuda::sm90::grad_qkv {

// Sends what the math warpgroups staged, and empties the slots it was staged in.
template <class C>
__device__ __forceinline__ void store_results(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  using S = Shared<C>;
  using B = Barriers<C>;
  const B barriers{memory};
  Ring<S::ring_slots> ring;
  const auto slot = [&] { return memory + S::ring + ring.slot * chunk_panel_bytes; };
  const auto finish = [] {
    arch::commit_stores();
    arch::wait_stores_read<0>();
  };
  unsigned parity = 0;
  each_tile<C::packed>(work, parity, [&](unsigned index) {
    const Tile<C::packed> tile(work.chunks, index);
#pragma unroll 1
    for (int t = 0; t < C::dhv_panels; ++t) {
      ring.advance();  // dC_t
      arch::wait(barriers.staged(B::dv_0 + t), parity);
      arch::store_box(slot(), &maps.dv, t * panel, tile.token, tile.head, tile.batch);
      finish();
      arch::arrive_for_warp(barriers.ring_empty(ring.slot));
      ring.advance();
    }
    ring.advance(C::dhv_panels);  // C
    arch::wait(barriers.staged(B::dk), parity);
#pragma unroll 1
    for (int p = 0; p < C::dqk_panels; ++p)
      arch::store_box(memory + S::dh + (S::dk_slot + p) * chunk_panel_bytes, &maps.dk, p * panel, tile.token, tile.head,
                      tile.batch);
    finish();
#pragma unroll 1
    for (int t = S::dk_slot; t < C::dhv_panels; ++t) arch::arrive_for_warp(barriers.dh_empty(t));
    arch::wait(barriers.staged(B::dq), parity);
#pragma unroll 1
    for (int block = 0; block < 2; ++block) {
#pragma unroll 1
      for (int p = 0; p < C::dqk_panels; ++p)
        arch::store_box(slot() + p * panel_bytes, &maps.dq, p * panel, tile.token + block * token_block, tile.head,
                        tile.batch);
      finish();
      arch::arrive_for_warp(barriers.ring_empty(ring.slot));
      ring.advance();
    }
  });
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::grad_qkv
