// grad_qkv_small: the thread that stores results.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/grad_qkv_small/shared.cuh"

namespace tfla::cuda::sm90::grad_qkv_small {

template <class C>
__device__ __forceinline__ void store_results(const Maps& maps, const Work& work, unsigned memory) {
  using B = Barriers;
  const B barriers{memory};
  unsigned parity = 0;
  each_tile<C::packed>(work, parity, [&](unsigned index) {
    const Tile<C::packed> tile(work.chunks, index);
    const auto store = [&](const CUtensorMap& map, unsigned from, int token) {
      arch::store_box(memory + from, &map, 0, tile.token + token, tile.head, tile.batch);
    };
    const auto finish = [&](B::Result result) {
      arch::commit_stores();
      arch::wait_stores_read<0>();
      arch::arrive(barriers.stored(result));
    };
    arch::wait(barriers.staged(B::dk), parity);
    store(maps.dk, Shared::v, 0);
    finish(B::dk);
    arch::wait(barriers.staged(B::dq), parity);
    store(maps.dq, Shared::ds, 0);
    store(maps.dq, Shared::ds + panel_bytes, token_block);
    finish(B::dq);
    arch::wait(barriers.staged(B::dv), parity);
    store(maps.dv, Shared::q, 0);
    store(maps.dv, Shared::k + panel_bytes, token_block);
    finish(B::dv);
  });
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::grad_qkv_small
