// grad_qk: the thread that stores.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::grad_qk {

// dK of token block 0 leaves from the rows of block 0 in Q, dK of token block 1 from the rows of block 1 in K.
template <class C>
__device__ __forceinline__ void store_results(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  using S = Shared<C>;
  const Barriers<C> barriers{memory};
  unsigned parity = 0;
  each_tile<C::packed>(work, parity, [&](unsigned index) {
    const ColumnTile<C> tile(work, index);
    const auto store = [&](const CUtensorMap& map, unsigned from, unsigned panel_distance, int token) {
#pragma unroll 1
      for (int p = 0; p < tile_panels; ++p)
        arch::store_box(from + p * panel_distance, &map, tile.column + p * panel, token, tile.head, tile.batch);
    };
    arch::wait(barriers.dk_staged(), parity);
    store(maps.dk, memory + S::q, chunk_panel_bytes, tile.token);
    store(maps.dk, memory + S::k + panel_bytes, chunk_panel_bytes, tile.token + token_block);
    arch::commit_stores();
    arch::wait(barriers.dq_staged(), parity);
#pragma unroll 1
    for (int block = 0; block < 2; ++block)
      store(maps.dq, memory + S::ds + block * chunk_panel_bytes, panel_bytes, tile.token + block * token_block);
    arch::commit_stores();
    arch::wait_stores_read<1>();
    arch::arrive_for_warp(barriers.q_empty());
    arch::arrive_for_warp(barriers.k_empty());
    arch::wait_stores_read<0>();
    arch::arrive(barriers.ds_empty());
  });
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::grad_qk
