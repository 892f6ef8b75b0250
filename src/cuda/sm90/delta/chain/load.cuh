// Kernels along the chain of states: the thread that loads.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/delta/chain/cta.cuh"

namespace tfla::cuda::sm90::delta_rule {

template <class C>
__device__ __forceinline__ void load_tiles_of(const ChainItem<C>& item) {
  using Shared = ChainShared<C>;
  const Shared& shared = item.shared;
  const int qk_head = item.head / item.call.dims.group;
  Ring<C::slots> ring;
#pragma unroll 1
  for (int step = 0; step < item.tiles; ++step, ring.advance()) {
    const int tile = item.tile_at(step);
    const unsigned full = shared.full(ring.slot), slot = shared.slot(ring.slot);
    const int token = item.map_token(tile), batch = item.map_batch();
    arch::wait(shared.empty(ring.slot), ring.phase ^ 1);
    arch::arrive_expecting(full, Shared::slot_bytes);
    for (int p = 0; p < C::key_panels; ++p) {
      if (C::reads_queries)
        arch::load_box(slot + Shared::q + p * panel_bytes, &item.maps.q, full, p * panel, token, qk_head, batch);
      arch::load_box(slot + Shared::k + p * panel_bytes, &item.maps.k, full, p * panel, token, qk_head, batch);
    }
    for (int p = 0; p < C::chains; ++p) {
      const int column = item.column + p * panel;
      arch::load_box(slot + Shared::v + p * panel_bytes, map_for(item.maps, item.maps.v, column, item.call.dims.dhv),
                     full, column, token, item.head, batch);
    }
    arch::load_box(slot + Shared::solved, &item.maps.solved, full, 0, 0,
                   static_cast<int>((item.sequence.first_tile + tile) * item.call.dims.heads + item.head));
  }
}

}  // namespace tfla::cuda::sm90::delta_rule
