// Stage `values` on Hopper: the warps that load and store. They have 24 registers.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_v/shared.cuh"

namespace tfla::cuda::sm90::values {

// One thread: the ring.
template <int Panels, bool Packed>
__device__ __forceinline__ void load_ring(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  const Barriers barriers{memory + Plan::barriers};
  Ring<Plan::ring_slots> ring;
  unsigned full = 0, slot = 0;
  const auto next = [&](unsigned bytes) {
    arch::wait(barriers.ring_empty(ring.slot), ring.phase ^ 1);
    full = barriers.ring_full(ring.slot);
    slot = memory + Plan::ring + ring.slot * Plan::room;
    arch::arrive_expecting(full, bytes);
    ring.advance();
  };
  const auto map_for = [&](int column, int token) {  // of dH: see nothing_map
    if constexpr (Packed) return column < work.dhv && token < work.chunks.tokens ? &maps.dh : &maps.nothing;
    return &maps.dh;
  };
  for (unsigned index = first_tile<Packed>(work.chunks, work.parts); index < work.parts.tiles;
       index = tile_after<Packed>(work.chunks, work.parts, index)) {
    const Part<Panels, Packed> tile(work, index);
#pragma unroll 1
    for (int p = 0; p < work.depth; ++p) {
      next(2 * slot_bytes);
      arch::load_box(slot, &maps.k, full, p * panel, tile.token, tile.head, tile.batch);
      arch::load_box(slot + slot_bytes, &maps.q, full, p * panel, tile.token, tile.head, tile.batch);
      next(Panels * half_bytes);
#pragma unroll 1
      for (int x = 0; x < Panels; ++x)
        arch::load_box(slot + x * half_bytes, &maps.dC, full, tile.column + x * panel, p * half, tile.state);
    }
#pragma unroll 1
    for (int query = 0; query < chunk; query += half) {
      next(Panels * half_bytes);
#pragma unroll 1
      for (int x = 0; x < Panels; ++x)
        arch::load_box(slot + x * half_bytes, map_for(tile.column + x * panel, tile.token + query), full,
                       tile.column + x * panel, tile.token + query, tile.head, tile.batch);
    }
  }
}

// One thread: sends what the consumers staged, each in a slot of dH, and empties the slots.
template <int Panels, bool Packed>
__device__ __forceinline__ void store_results(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  const Barriers barriers{memory + Plan::barriers};
  int slot = 0;
  unsigned turn = 0;
  for (unsigned index = first_tile<Packed>(work.chunks, work.parts); index < work.parts.tiles;
       index = tile_after<Packed>(work.chunks, work.parts, index), ++turn) {
    const Part<Panels, Packed> tile(work, index);
    slot += 2 * work.depth;
#pragma unroll 1
    for (int w = 0; w < 2; ++w, ++slot) {
      slot %= Plan::ring_slots;
      arch::wait(barriers.staged(w, turn), turn >> 1 & 1);
#pragma unroll 1
      for (int x = 0; x < Panels; ++x)
        arch::store_box(memory + Plan::ring + slot * Plan::room + x * half_bytes, &maps.dv, tile.column + x * panel,
                        tile.token + w * half, tile.head, tile.batch);
      arch::commit_stores();
      arch::wait_stores_read<0>();
      arch::arrive_for_warp(barriers.ring_empty(slot));
    }
  }
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::values
