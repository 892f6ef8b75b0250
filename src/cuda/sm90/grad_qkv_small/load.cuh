// grad_qkv_small: the thread that loads tensors.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/grad_qkv_small/shared.cuh"

namespace tfla::cuda::sm90::grad_qkv_small {

// All tensors of a tile, in the order in which their places become free.
template <class C>
__device__ __forceinline__ void load_tensors(const Maps& maps, const Work& work, unsigned memory) {
  using B = Barriers;
  const B barriers{memory};
  unsigned parity = 1;  // of the tile before
  each_tile<C::packed>(work, parity, [&](unsigned index) {
    const Tile<C::packed> tile(work.chunks, index);
    const auto load_tokens = [&](const CUtensorMap& map, unsigned to, unsigned full, int head) {
      arch::arrive_expecting(full, chunk_panel_bytes);
      arch::load_box(memory + to, &map, full, 0, tile.token, head, tile.batch);
    };
    const auto load_state = [&](const CUtensorMap& map, unsigned to, unsigned full) {
      arch::arrive_expecting(full, panel_bytes);
      arch::load_box(memory + to, &map, full, 0, 0, tile.state);
    };
    arch::wait(barriers.stored(B::dk), parity);
    load_tokens(maps.v, Shared::v, barriers.full(B::v), tile.head);
    arch::wait(barriers.staged(B::dq), parity);
    load_state(maps.C, Shared::C, barriers.full(B::C));
    arch::wait(barriers.staged(B::dv), parity);
    load_tokens(maps.dh, Shared::dh, barriers.full(B::dh), tile.head);
    load_state(maps.dC, Shared::dC, barriers.full(B::dC));
    arch::wait(barriers.stored(B::dv), parity);
    load_tokens(maps.k, Shared::k, barriers.full(B::k), tile.qk_head(work.chunks));
    load_tokens(maps.q, Shared::q, barriers.full(B::q), tile.qk_head(work.chunks));
  });
}

// One warp: gate vectors.
template <class C>
__device__ __forceinline__ void load_gate_vectors(const Maps& /*maps*/, const Work& work, unsigned memory) {
  const Barriers barriers{memory};
  load_gates<C, Shared::Gates>(work, memory, barriers.full(Barriers::gates), barriers.staged(Barriers::dv));
}

}  // namespace tfla::cuda::sm90::grad_qkv_small
