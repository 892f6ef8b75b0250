// grad_v: the thread that stores. It has 24 registers.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/grad_v/shared.cuh"

namespace tfla::cuda::sm90::grad_v {

// Sends dV of both token blocks, each from the slot of its dH, and empties the slots.
template <class C>
__device__ __forceinline__ void store_results(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  const Barriers barriers{memory};
  int slot = 0;
  unsigned turn = 0;
  each_tile<C::packed>(work, [&](unsigned index) {
    const ColumnTile<C> tile(work, index);
    slot += 2 * work.depth;
#pragma unroll 1
    for (int block = 0; block < 2; ++block, ++slot) {
      slot %= Shared::ring_slots;
      arch::wait(barriers.staged(block, turn), turn >> 1 & 1);
#pragma unroll 1
      for (int x = 0; x < C::panels; ++x)
        arch::store_box(memory + Shared::ring + slot * Shared::slot_bytes + x * panel_bytes, &maps.dv,
                        tile.column + x * panel, tile.token + block * token_block, tile.head, tile.batch);
      arch::commit_stores();
      arch::wait_stores_read<0>();
      arch::arrive_for_warp(barriers.ring_empty(slot));
    }
    ++turn;
  });
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::grad_v
