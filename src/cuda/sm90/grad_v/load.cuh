// grad_v: the thread that loads. It has 24 registers.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_v/shared.cuh"

namespace tfla::cuda::sm90::grad_v {

template <class C>
__device__ __forceinline__ void load_ring(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  const Barriers barriers{memory};
  Ring<Shared::ring_slots> ring;
  unsigned full = 0, slot = 0;
  const auto next = [&](unsigned bytes) {
    arch::wait(barriers.ring_empty(ring.slot), ring.phase ^ 1);
    full = barriers.ring_full(ring.slot);
    slot = memory + Shared::ring + ring.slot * Shared::slot_bytes;
    arch::arrive_expecting(full, bytes);
    ring.advance();
  };
  const auto dh_map = [&](int column, int token) {
    return map_for(maps, maps.dh, column < work.dhv && token < work.chunks.tokens);
  };
  each_tile<C::packed>(work, [&](unsigned index) {
    const ColumnTile<C> tile(work, index);
    const int qk_head = tile.qk_head(work.chunks);
#pragma unroll 1
    for (int p = 0; p < work.depth; ++p) {
      next(2 * chunk_panel_bytes);
      arch::load_box(slot, &maps.k, full, p * panel, tile.token, qk_head, tile.batch);
      arch::load_box(slot + chunk_panel_bytes, &maps.q, full, p * panel, tile.token, qk_head, tile.batch);
      next(C::panels * panel_bytes);
#pragma unroll 1
      for (int x = 0; x < C::panels; ++x)
        arch::load_box(slot + x * panel_bytes, &maps.dC, full, tile.column + x * panel, p * panel, tile.state);
    }
#pragma unroll 1
    for (int query = 0; query < chunk_tokens; query += token_block) {
      next(C::panels * panel_bytes);
#pragma unroll 1
      for (int x = 0; x < C::panels; ++x)
        arch::load_box(slot + x * panel_bytes, dh_map(tile.column + x * panel, tile.token + query), full,
                       tile.column + x * panel, tile.token + query, tile.head, tile.batch);
    }
  });
}

// One warp: gate vectors.
template <class C>
__device__ __forceinline__ void load_gate_vectors(const MapsOf<C>& /*maps*/, const Work& work, unsigned memory) {
  const Barriers barriers{memory};
  load_gates<C, Shared::Gates>(work, memory, barriers.gates_full(), barriers.gates_empty());
}

}  // namespace tfla::cuda::sm90::grad_v
