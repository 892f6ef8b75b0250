// grad_qkv: the threads that load. They have 24 registers.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_qkv/shared.cuh"

namespace tfla::cuda::sm90::grad_qkv {

// The map for panel t of dhv. Heads of 64/64 in float16 have two panels all the same, and nothing is in the second.
template <class C>
__device__ __forceinline__ const CUtensorMap* panel_map(const MapsOf<C>& maps, const CUtensorMap& map, const Work& work,
                                                        int t) {
  return map_for(maps, map, C::dhv_panels > 2 || t * panel < work.dhv);
}

// One thread: the ring.
template <class C>
__device__ __forceinline__ void load_ring(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  using S = Shared<C>;
  constexpr unsigned state_bytes = C::dqk_panels * panel_bytes;
  const Barriers<C> barriers{memory};
  Ring<S::ring_slots> ring;
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
    arch::load_box(memory + S::ring + ring.slot * chunk_panel_bytes, &map, full, t * panel, 0, state);
    ring.advance();
  };
  each_tile<C::packed>(work, [&](unsigned index) {
    const Tile<C::packed> tile(work.chunks, index);
#pragma unroll 1
    for (int t = 0; t < C::dhv_panels; ++t) {
      load_state(maps.dC, tile.state, t);
      const unsigned full = next_free();
      arch::arrive_expecting(full, chunk_panel_bytes);
      arch::load_box(memory + S::ring + ring.slot * chunk_panel_bytes, panel_map<C>(maps, maps.v, work, t), full,
                     t * panel, tile.token, tile.head, tile.batch);
      ring.advance();
    }
#pragma unroll 1
    for (int t = 0; t < C::dhv_panels; ++t) load_state(maps.C, tile.state, t);
    skip();
    skip();
  });
  // Math warpgroups begin a tile after their last one, unconditionally: see begin_dk.
  if constexpr (C::begins_next_tile) {
    skip();
    skip();
  }
}

// One thread: what stays for a tile. Q and K are needed first; the slots through which dK leaves become free last.
template <class C>
__device__ __forceinline__ void load_resident(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  using S = Shared<C>;
  const Barriers<C> barriers{memory};
  unsigned parity = 1;
  each_tile<C::packed>(work, parity, [&](unsigned index) {
    const Tile<C::packed> tile(work.chunks, index);
    const auto load = [&](const CUtensorMap* map, unsigned to, unsigned full, int first, int panels, int head) {
      arch::arrive_expecting(full, panels * chunk_panel_bytes);
#pragma unroll 1
      for (int p = 0; p < panels; ++p)
        arch::load_box(to + p * chunk_panel_bytes, map, full, (first + p) * panel, tile.token, head, tile.batch);
    };
    const auto load_dh = [&](int t) {
      arch::wait(barriers.dh_empty(t), parity);
      load(panel_map<C>(maps, maps.dh, work, t), memory + S::dh + t * chunk_panel_bytes, barriers.dh_full(t), t, 1,
           tile.head);
    };
#pragma unroll 1
    for (int t = 0; t < S::dk_slot; ++t) load_dh(t);
    arch::wait(barriers.q_empty(), parity);
    load(&maps.q, memory + S::q, barriers.q_full(), 0, C::dqk_panels, tile.qk_head(work.chunks));
    arch::wait(barriers.k_empty(), parity);
    load(&maps.k, memory + S::k, barriers.k_full(), 0, C::dqk_panels, tile.qk_head(work.chunks));
#pragma unroll 1
    for (int t = S::dk_slot; t < C::dhv_panels; ++t) load_dh(t);
  });
}

// One warp: gate vectors.
template <class C>
__device__ __forceinline__ void load_gate_vectors(const MapsOf<C>& /*maps*/, const Work& work, unsigned memory) {
  const Barriers<C> barriers{memory};
  load_gates<C, typename Shared<C>::Gates>(work, memory, barriers.gates_full(), barriers.gates_empty());
}

}  // namespace tfla::cuda::sm90::grad_qkv
