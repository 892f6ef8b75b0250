// Stage `gradients` on Hopper: the warps that load and store. They have 24 registers.
#pragma once

#include "cuda/arch/copy.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/common/device.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_qkv/shared.cuh"

namespace tfla::cuda::sm90::gradients {

// See nothing_map: heads of dhv up to 64 have two panels all the same.
template <class Size, bool Packed>
__device__ __forceinline__ const CUtensorMap* panel_map(const MapsOf<Packed>& maps, const CUtensorMap& map,
                                                        const Work& work, int t) {
  if constexpr (Packed && Size::dhv == 2) return t * panel < work.dhv ? &map : &maps.nothing;
  return &map;
}

// One thread: the ring.
template <class Size, bool Packed>
__device__ __forceinline__ void load_ring(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  using P = Plan<Size>;
  constexpr unsigned state_bytes = Size::dqk * half_bytes;
  const Barriers<Size> barriers{memory + P::barriers};
  Ring<P::ring_slots> ring;
  const auto next_free = [&] {
    arch::wait(barriers.ring_empty(ring.slot), ring.phase ^ 1);
    return barriers.ring_full(ring.slot);
  };
  const auto skip = [&] {
    arch::arrive(next_free());
    ring.advance();
  };
  const auto load_state = [&](const CUtensorMap& map, int state, int t) {
    const unsigned full = next_free();
    arch::arrive_expecting(full, state_bytes);
    arch::load_box(memory + P::ring + ring.slot * slot_bytes, &map, full, t * panel, 0, state);
    ring.advance();
  };
  for (unsigned index = first_tile<Packed>(work.chunks, work.tiles); index < work.tiles.tiles;
       index = tile_after<Packed>(work.chunks, work.tiles, index)) {
    const Tile<Packed> tile(work.chunks, index);
#pragma unroll 1
    for (int t = 0; t < Size::dhv; ++t) {
      load_state(maps.dC, tile.state, t);
      const unsigned full = next_free();
      arch::arrive_expecting(full, slot_bytes);
      arch::load_box(memory + P::ring + ring.slot * slot_bytes, panel_map<Size, Packed>(maps, maps.v, work, t), full,
                     t * panel, tile.token, tile.head, tile.batch);
      ring.advance();
    }
#pragma unroll 1
    for (int t = 0; t < Size::dhv; ++t) load_state(maps.C, tile.state, t);
    skip();
    skip();
  }
  // Consumers begin a tile after their last one, unconditionally: see begin_dk.
  skip();
  skip();
}

// One thread: what stays for a tile. Q and K are needed first; the slots through which dK leaves come last.
template <class Size, bool Packed>
__device__ __forceinline__ void load_resident(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  using P = Plan<Size>;
  const Barriers<Size> barriers{memory + P::barriers};
  unsigned parity = 1;
  for (unsigned index = first_tile<Packed>(work.chunks, work.tiles); index < work.tiles.tiles;
       index = tile_after<Packed>(work.chunks, work.tiles, index), parity ^= 1) {
    const Tile<Packed> tile(work.chunks, index);
    const auto load = [&](const CUtensorMap* map, unsigned to, unsigned full, int first, int panels) {
      arch::arrive_expecting(full, panels * slot_bytes);
#pragma unroll 1
      for (int p = 0; p < panels; ++p)
        arch::load_box(to + p * slot_bytes, map, full, (first + p) * panel, tile.token, tile.head, tile.batch);
    };
    const auto load_dh = [&](int t) {
      arch::wait(barriers.dh_empty(t), parity);
      load(panel_map<Size, Packed>(maps, maps.dh, work, t), memory + P::dh + t * slot_bytes, barriers.dh_full(t), t, 1);
    };
#pragma unroll 1
    for (int t = 0; t < P::dk_slot; ++t) load_dh(t);
    arch::wait(barriers.q_empty(), parity);
    load(&maps.q, memory + P::q, barriers.q_full(), 0, Size::dqk);
    arch::wait(barriers.k_empty(), parity);
    load(&maps.k, memory + P::k, barriers.k_full(), 0, Size::dqk);
#pragma unroll 1
    for (int t = P::dk_slot; t < Size::dhv; ++t) load_dh(t);
  }
}

// One thread: sends what the consumers staged, and empties the slots.
template <class Size, bool Packed>
__device__ __forceinline__ void store_results(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  using P = Plan<Size>;
  using B = Barriers<Size>;
  const B barriers{memory + P::barriers};
  Ring<P::ring_slots> ring;
  const auto slot = [&] { return memory + P::ring + ring.slot * slot_bytes; };
  const auto read = [] {
    arch::commit_stores();
    arch::wait_stores_read<0>();
  };
  unsigned parity = 0;
  for (unsigned index = first_tile<Packed>(work.chunks, work.tiles); index < work.tiles.tiles;
       index = tile_after<Packed>(work.chunks, work.tiles, index), parity ^= 1) {
    const Tile<Packed> tile(work.chunks, index);
#pragma unroll 1
    for (int t = 0; t < Size::dhv; ++t) {
      ring.advance();  // dC_t
      arch::wait(barriers.staged(t), parity);
      arch::store_box(slot(), &maps.dv, t * panel, tile.token, tile.head, tile.batch);
      read();
      arch::arrive_for_warp(barriers.ring_empty(ring.slot));
      ring.advance();
    }
    ring.advance(Size::dhv);  // C
    arch::wait(barriers.staged(B::dk_job), parity);
#pragma unroll 1
    for (int p = 0; p < Size::dqk; ++p)
      arch::store_box(memory + P::dh + (P::dk_slot + p) * slot_bytes, &maps.dk, p * panel, tile.token, tile.head,
                      tile.batch);
    read();
#pragma unroll 1
    for (int p = 0; p < Size::dqk; ++p) arch::arrive_for_warp(barriers.dh_empty(P::dk_slot + p));
    arch::wait(barriers.staged(B::dq_job), parity);
#pragma unroll 1
    for (int w = 0; w < 2; ++w) {
#pragma unroll 1
      for (int p = 0; p < Size::dqk; ++p)
        arch::store_box(slot() + p * half_bytes, &maps.dq, p * panel, tile.token + w * half, tile.head, tile.batch);
      read();
      arch::arrive_for_warp(barriers.ring_empty(ring.slot));
      ring.advance();
    }
  }
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::gradients
