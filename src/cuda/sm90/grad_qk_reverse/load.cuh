// grad_qk_reverse: the warps that load.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/grad_qk_reverse/cta.cuh"

namespace tfla::cuda::sm90::grad_qk_reverse {

template <class C>
struct Load {
  using S = Shared<C>;
  using Item = typename Cta<C>::Item;
  using Chunk = Tile<C::packed>;

  const Cta<C>& cta;

  // One thread: Q, then panels of dH, V and C.
  __device__ __forceinline__ void panels() const {
    const Barriers<C> barriers = cta.barriers();
    unsigned chunks = 0, panels = 0;
    cta.each_chunk([&](const Item& it, unsigned unit) {
      const Chunk chunk(cta.work.chunks, unit);
      const int buffer = static_cast<int>(chunks % 2);
      arch::wait(barriers.q_empty(buffer), (chunks / 2 & 1) ^ 1);
      arch::arrive_expecting(barriers.q_full(buffer), chunk_panel_bytes);
      arch::load_box(cta.memory + S::q + buffer * chunk_panel_bytes, &cta.maps.q, barriers.q_full(buffer), it.row,
                     chunk.token, chunk.head, chunk.batch);
      ++chunks;
#pragma unroll 1
      for (int t = 0; t < C::dhv_panels; ++t, ++panels) {
        tokens<panels_dh>(panels, cta.maps.dh, t, chunk);
        tokens<panels_v>(panels, cta.maps.v, t, chunk);
        unsigned full;
        const unsigned to = next_free<panels_C>(panels, full);
        arch::load_box(to, &cta.maps.C, full, t * panel, it.row, chunk.state);
      }
    });
  }

  // One thread: K. It is needed after the panels.
  __device__ __forceinline__ void keys() const {
    const Barriers<C> barriers = cta.barriers();
    unsigned parity = 1;
    cta.each_chunk([&](const Item& it, unsigned unit) {
      const Chunk chunk(cta.work.chunks, unit);
      arch::wait(barriers.k_empty(), parity);
      parity ^= 1;
      arch::arrive_expecting(barriers.k_full(), chunk_panel_bytes);
      arch::load_box(cta.memory + S::k, &cta.maps.k, barriers.k_full(), it.row, chunk.token, chunk.head, chunk.batch);
    });
  }

  // One warp: gate vectors. A chunk is sent when the next one is known, so that math is told which is the last. Every
  // CTA of a dense batch has chunks; one of packed sequences that has none sends a chunk without tokens.
  __device__ __forceinline__ void gates() const {
    unsigned parity = 1, pending = 0;
    int pending_tile = -1;
    cta.each_chunk([&](const Item& it, unsigned unit) {
      if (pending_tile >= 0) send_gates(pending, pending_tile, false, parity);
      pending = unit;
      pending_tile = it.row / tile_rows;
    });
    if (!C::packed || pending_tile >= 0) return send_gates(pending, pending_tile, true, parity);
    if (threadIdx.x % warp_threads == 0) arch::write_int2(cta.memory + Gates::info, {0, TileInfo::last_flag});
    arch::arrive(cta.barriers().gates_full());
  }

 private:
  using Gates = typename S::Gates;
  using Loader = GateLoader<C, Gates, typename Cta<C>::Work, NothingMore>;

  // Waits until the slot of a panel is free. Returns the slot; full: its barrier.
  template <Panels P>
  __device__ __forceinline__ unsigned next_free(unsigned panel_number, unsigned& full) const {
    const auto ring = RingOf<P>::at(panel_number);
    arch::wait(cta.barriers().template ring_empty<P>(ring.slot), ring.phase ^ 1);
    full = cta.barriers().template ring_full<P>(ring.slot);
    arch::arrive_expecting(full, RingOf<P>::slot_bytes);
    return S::template slot<P>(cta.memory, ring.slot);
  }
  template <Panels P>
  __device__ __forceinline__ void tokens(unsigned panel_number, const CUtensorMap& map, int t,
                                         const Chunk& chunk) const {
    unsigned full;
    const unsigned to = next_free<P>(panel_number, full);
    arch::load_box(to, map_for(cta.maps, map, t * panel, cta.call.dims.dhv), full, t * panel, chunk.token, chunk.head,
                   chunk.batch);
  }

  __device__ __forceinline__ void send_gates(unsigned unit, int tile, bool last, unsigned& parity) const {
    const int lane = threadIdx.x % warp_threads;
    const Loader loader{cta.work, NothingMore{}, cta.memory, lane};
    const Chunk chunk(cta.work.chunks, unit);
    typename Loader::Tokens own;
    loader.read(own, chunk);
    arch::wait(cta.barriers().gates_empty(), parity);
    parity ^= 1;
    loader.write(own);
    loader.copy_c(chunk);
    if (lane == 0) {
      loader.write_flows(chunk.state);
      const int vectors_before = tile * cta.work.chunks.heads * cta.work.chunks.all_tokens;
      arch::write_int2(cta.memory + Gates::info,
                       {chunk.at + vectors_before, chunk.length + (last ? TileInfo::last_flag : 0)});
    }
    arch::commit_copies();
    arch::wait_copies<0>();
    arch::arrive(cta.barriers().gates_full());
  }
};

}  // namespace tfla::cuda::sm90::grad_qk_reverse
