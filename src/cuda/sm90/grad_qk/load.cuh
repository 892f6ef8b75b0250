// Stage `keys` on Hopper: the warps that load and store. They have 24 registers.
#pragma once

#include "cuda/arch/tma.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::keys {

// One thread: panels of V, dH, dC and C. Rows: without dC.
template <bool Packed, bool Rows = false>
__device__ __forceinline__ void load_panels(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  const Barriers barriers{memory + Plan::barriers};
  Ring<Plan::stages> ring;
  for (unsigned index = first_tile<Packed>(work.chunks, work.parts); index < work.parts.tiles;
       index = tile_after<Packed>(work.chunks, work.parts, index)) {
    const Part<Packed> tile(work, index);
#pragma unroll 1
    for (int t = 0; t < work.dhv_panels; ++t, ring.advance()) {
      const int first = ring.slot * panel_slots;
      const unsigned stage = memory + Plan::ring + first * slot_bytes;
      const auto next_free = [&](Slot slot) {
        arch::wait(barriers.ring_empty(first + slot), ring.phase ^ 1);
        const unsigned full = barriers.ring_full(first + slot);
        arch::arrive_expecting(full, slot_bytes);
        return full;
      };
      const auto load_tokens = [&](Slot slot, const CUtensorMap& map) {
        const unsigned full = next_free(slot);
        arch::load_box(stage + slot * slot_bytes, &map, full, t * panel, tile.token, tile.head, tile.batch);
      };
      const auto load_state = [&](Slot slot, const CUtensorMap& map) {
        const unsigned full = next_free(slot);
        arch::load_box(stage + slot * slot_bytes, &map, full, t * panel, tile.column, tile.state);
      };
      load_tokens(slot_v, maps.v);
      load_tokens(slot_dh, maps.dh);
      if (!Rows) load_state(slot_dC, maps.dC);
      load_state(slot_C, maps.C);
    }
  }
}

// One thread: Q and K. They are needed after the panels.
template <bool Packed>
__device__ __forceinline__ void load_resident(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  const Barriers barriers{memory + Plan::barriers};
  unsigned parity = 1;
  for (unsigned index = first_tile<Packed>(work.chunks, work.parts); index < work.parts.tiles;
       index = tile_after<Packed>(work.chunks, work.parts, index), parity ^= 1) {
    const Part<Packed> tile(work, index);
    const auto map_for = [&](const CUtensorMap& map, int column) {  // see nothing_map
      if constexpr (Packed) return column < work.dqk ? &map : &maps.nothing;
      return &map;
    };
    const auto load = [&](const CUtensorMap& map, unsigned to, unsigned full, unsigned empty) {
      arch::wait(empty, parity);
      arch::arrive_expecting(full, column_panels * slot_bytes);
#pragma unroll 1
      for (int p = 0; p < column_panels; ++p)
        arch::load_box(to + p * slot_bytes, map_for(map, tile.column + p * panel), full, tile.column + p * panel,
                       tile.token, tile.head, tile.batch);
    };
    load(maps.k, memory + Plan::k, barriers.k_full(), barriers.k_empty());
    load(maps.q, memory + Plan::q, barriers.q_full(), barriers.q_empty());
  }
}

// One warp: <n, dn> of a tile. n and dn are then in L1 for the consumers.
__device__ __forceinline__ float norm_product(const Work& work, unsigned index) {
  const NormPart norms(work, index);
  float sum = 0;
#pragma unroll 1
  for (int x = static_cast<int>(threadIdx.x % 32); x < norms.columns; x += 32) sum = fmaf(norms.n[x], norms.dn[x], sum);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, offset);
  return sum;
}

// One thread: sends what the consumers staged. dK of consumer 0 lies in the first half of Q, that of consumer 1 in the
// second half of K.
template <bool Packed>
__device__ __forceinline__ void store_results(const MapsOf<Packed>& maps, const Work& work, unsigned memory) {
  const Barriers barriers{memory + Plan::barriers};
  unsigned parity = 0;
  for (unsigned index = first_tile<Packed>(work.chunks, work.parts); index < work.parts.tiles;
       index = tile_after<Packed>(work.chunks, work.parts, index), parity ^= 1) {
    const Part<Packed> tile(work, index);
    const auto store = [&](const CUtensorMap& map, unsigned from, unsigned panel_bytes, int token) {
#pragma unroll 1
      for (int p = 0; p < column_panels; ++p)
        arch::store_box(from + p * panel_bytes, &map, tile.column + p * panel, token, tile.head, tile.batch);
    };
    arch::wait(barriers.dk_staged(), parity);
    store(maps.dk, memory + Plan::q, slot_bytes, tile.token);
    store(maps.dk, memory + Plan::k + half_bytes, slot_bytes, tile.token + half);
    arch::commit_stores();
    arch::wait(barriers.dq_staged(), parity);
#pragma unroll 1
    for (int w = 0; w < 2; ++w) store(maps.dq, memory + Plan::ds + w * slot_bytes, half_bytes, tile.token + w * half);
    arch::commit_stores();
    arch::wait_stores_read<1>();
    arch::arrive_for_warp(barriers.q_empty());
    arch::arrive_for_warp(barriers.k_empty());
    arch::wait_stores_read<0>();
    arch::arrive(barriers.ds_empty());
  }
  arch::wait_stores<0>();
}

}  // namespace tfla::cuda::sm90::keys
