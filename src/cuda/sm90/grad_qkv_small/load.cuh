// Stage `gradients` on Hopper for narrow heads: the warps that load and store.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/grad_qkv_small/shared.cuh"

namespace tfla::cuda::sm90::narrow {

// One thread: all tensors of a tile, in the order in which their places become free.
template <bool Packed>
__device__ __forceinline__ void load_tensors(const Maps& maps, const Work& work, unsigned memory) {
  using B = Barriers;
  const B barriers{memory + Plan::barriers};
  unsigned parity = 1;  // of the tile before
  for (unsigned index = first_tile<Packed>(work.chunks, work.tiles); index < work.tiles.tiles;
       index = tile_after<Packed>(work.chunks, work.tiles, index), parity ^= 1) {
    const Tile<Packed> tile(work.chunks, index);
    const auto load_tokens = [&](const CUtensorMap& map, unsigned to, unsigned full) {
      arch::arrive_expecting(full, slot_bytes);
      arch::load_box(memory + to, &map, full, 0, tile.token, tile.head, tile.batch);
    };
    const auto load_state = [&](const CUtensorMap& map, unsigned to, unsigned full) {
      arch::arrive_expecting(full, half_bytes);
      arch::load_box(memory + to, &map, full, 0, 0, tile.state);
    };
    arch::wait(barriers.stored(B::dk), parity);
    load_tokens(maps.v, Plan::v, barriers.full(B::v));
    arch::wait(barriers.staged(B::dq), parity);
    load_state(maps.C, Plan::C, barriers.full(B::C));
    arch::wait(barriers.staged(B::dv), parity);
    load_tokens(maps.dh, Plan::dh, barriers.full(B::dh));
    load_state(maps.dC, Plan::dC, barriers.full(B::dC));
    arch::wait(barriers.stored(B::dv), parity);
    load_tokens(maps.k, Plan::k, barriers.full(B::k));
    load_tokens(maps.q, Plan::q, barriers.full(B::q));
  }
}

// One thread: sends what the consumers staged.
template <bool Packed>
__device__ __forceinline__ void store_results(const Maps& maps, const Work& work, unsigned memory) {
  using B = Barriers;
  const B barriers{memory + Plan::barriers};
  unsigned parity = 0;
  for (unsigned index = first_tile<Packed>(work.chunks, work.tiles); index < work.tiles.tiles;
       index = tile_after<Packed>(work.chunks, work.tiles, index), parity ^= 1) {
    const Tile<Packed> tile(work.chunks, index);
    const auto store = [&](const CUtensorMap& map, unsigned from, int token) {
      arch::store_box(memory + from, &map, 0, tile.token + token, tile.head, tile.batch);
    };
    const auto read = [&](B::Result result) {
      arch::commit_stores();
      arch::wait_stores_read<0>();
      arch::arrive(barriers.stored(result));
    };
    arch::wait(barriers.staged(B::dk), parity);
    store(maps.dk, Plan::v, 0);
    read(B::dk);
    arch::wait(barriers.staged(B::dq), parity);
    store(maps.dq, Plan::ds, 0);
    store(maps.dq, Plan::ds + half_bytes, half);
    read(B::dq);
    arch::wait(barriers.staged(B::dv), parity);
    store(maps.dv, Plan::q, 0);
    store(maps.dv, Plan::k + half_bytes, half);
    read(B::dv);
  }
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::narrow
