// grad_qk and row_dots: the warps that load.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::grad_qk {

// One thread: panels of V, dH, dC and C.
template <class C>
__device__ __forceinline__ void load_panels(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  using S = Shared<C>;
  const Barriers<C> barriers{memory};
  Ring<S::stages> ring;
  each_tile<C::packed>(work, [&](unsigned index) {
    const ColumnTile<C> tile(work, index);
#pragma unroll 1
    for (int t = 0; t < work.dhv_panels; ++t, ring.advance()) {
      const int first = ring.slot * stage_slots;
      const unsigned stage = memory + S::ring + first * chunk_panel_bytes;
      const auto next_free = [&](Slot slot) {
        arch::wait(barriers.ring_empty(first + slot), ring.phase ^ 1);
        const unsigned full = barriers.ring_full(first + slot);
        arch::arrive_expecting(full, chunk_panel_bytes);
        return full;
      };
      const auto load_tokens = [&](Slot slot, const CUtensorMap& map) {
        const unsigned full = next_free(slot);
        arch::load_box(stage + slot * chunk_panel_bytes, &map, full, t * panel, tile.token, tile.head, tile.batch);
      };
      const auto load_state = [&](Slot slot, const CUtensorMap& map) {
        const unsigned full = next_free(slot);
        arch::load_box(stage + slot * chunk_panel_bytes, &map, full, t * panel, tile.column, tile.state);
      };
      load_tokens(slot_v, maps.v);
      load_tokens(slot_dh, maps.dh);
      if (!C::dots_only) load_state(slot_dC, maps.dC);
      load_state(slot_C, maps.C);
    }
  });
}

// One thread: Q and K. They are needed after the panels.
template <class C>
__device__ __forceinline__ void load_resident(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  using S = Shared<C>;
  const Barriers<C> barriers{memory};
  unsigned parity = 1;
  each_tile<C::packed>(work, parity, [&](unsigned index) {
    const ColumnTile<C> tile(work, index);
    const auto load = [&](const CUtensorMap& map, unsigned to, unsigned full, unsigned empty) {
      arch::wait(empty, parity);
      arch::arrive_expecting(full, tile_panels * chunk_panel_bytes);
#pragma unroll 1
      for (int p = 0; p < tile_panels; ++p)
        arch::load_box(to + p * chunk_panel_bytes, map_for(maps, map, tile.column + p * panel < work.dqk), full,
                       tile.column + p * panel, tile.token, tile.qk_head(work.chunks), tile.batch);
    };
    load(maps.k, memory + S::k, barriers.k_full(), barriers.k_empty());
    load(maps.q, memory + S::q, barriers.q_full(), barriers.q_empty());
  });
}

// One warp: what load_gates adds to gate vectors.
template <class C>
struct ColumnGates {
  const Work& work;

  // Numbers of the column tiles before this one in vectors of sums. For dense batches without gradients of n the math
  // warpgroups know the tile, and add this themselves.
  __device__ __forceinline__ int vectors_before(unsigned tile) const {
    return C::packed || C::norm ? static_cast<int>(work.tiles.column_tile_of(tile)) * work.vectors : 0;
  }
  // <n, dn> of a tile. n and dn are then in L1 for the math warpgroups.
  __device__ __forceinline__ float norm_product(unsigned tile) const {
    float sum = 0;
    if constexpr (C::norm) {
      const NormColumns norm(work, tile);
#pragma unroll 1
      for (int x = static_cast<int>(threadIdx.x % warp_threads); x < norm.columns; x += warp_threads)
        sum = fmaf(norm.n[x], norm.dn[x], sum);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, offset);
    }
    return sum;
  }
};

// One warp: gate vectors.
template <class C>
__device__ __forceinline__ void load_gate_vectors(const MapsOf<C>& /*maps*/, const Work& work, unsigned memory) {
  const Barriers<C> barriers{memory};
  load_gates<C, typename Shared<C>::Gates>(work, memory, barriers.gates_full(), barriers.gates_empty(),
                                           ColumnGates<C>{work});
}

}  // namespace tfla::cuda::sm90::grad_qk
