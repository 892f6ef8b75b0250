// grad_qk and row_dots: the arguments of the kernels, their tiles, shared memory and barriers.
#pragma once

#include <cuda.h>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/gates.cuh"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/grad_qk/config.h"

namespace tfla::cuda::sm90::grad_qk {

struct Maps {
  CUtensorMap q, k, v, dh;  // boxes of 128 tokens
  CUtensorMap dq, dk;       // of 64
  CUtensorMap C, dC;        // of 128 rows of a state
};
template <class C>
using MapsOf = MapsFor<Maps, C::packed>;

// The rest of the call.
struct Work {
  Chunks chunks;
  float* row_sums;  // [column tiles, heads, tokens], like the other two
  float* column_sums;
  float* outflow;
  int dhv_panels;  // of 64 columns
  ColumnTiles tiles;
  int dqk;
  int vectors;                     // numbers of a column tile in the sums: heads x tokens
  int state_tiles, state_columns;  // float16: tiles of C and dC that have a scale of their own, in all and side by side
  double* traces;                  // gbar <C, dC> of the warps of math warpgroup 1; null: nobody asks for them
  const float* decays;             // gbar
  const float *n, *dn;             // [chunks and heads, dqk], where there are gradients of n
};

// 128 columns of dqk of a chunk of a head. All tiles of a chunk read V and dH.
template <class C>
struct ColumnTile : Tile<C::packed> {
  int column;  // first one

  __device__ __forceinline__ ColumnTile(const Work& work, unsigned tile)
      : Tile<C::packed>(work.chunks, work.tiles.chunk_of(tile)),
        column(static_cast<int>(work.tiles.column_tile_of(tile)) * tile_columns) {}
};

// n and dn of a tile.
struct NormColumns {
  const float *n, *dn;
  int columns;

  __device__ __forceinline__ NormColumns(const Work& work, unsigned tile) {
    const int first = static_cast<int>(work.tiles.column_tile_of(tile)) * tile_columns;
    const std::int64_t at = static_cast<std::int64_t>(work.tiles.chunk_of(tile)) * work.dqk + first;
    n = work.n + at;
    dn = work.dn + at;
    columns = min(work.dqk - first, tile_columns);
  }
};

// The slots of a stage of the ring: a panel of 64 columns of dhv of each tensor.
enum Slot : int { slot_v, slot_dh, slot_dC, slot_C, stage_slots };

// Shared memory, in bytes.
template <class C>
struct Shared {
  static constexpr int stages = 2;
  static constexpr unsigned stage_bytes = stage_slots * chunk_panel_bytes;

  static constexpr unsigned q = 0;
  static constexpr unsigned k = q + tile_panels * chunk_panel_bytes;
  static constexpr unsigned ds = k + tile_panels * chunk_panel_bytes;  // [query block][key][query]; dQ leaves here
  static constexpr unsigned ring = ds + 2 * chunk_panel_bytes;
  using Gates = GateShared<ring + stages * stage_bytes, true>;
  static constexpr unsigned largest = (Gates::end + 15) / 16 * 16;  // float16: see largest_of_warps
  static constexpr unsigned barriers = largest + 2 * 4 * C::math_warps;
};

// Math warpgroups wait for `full` barriers and ds_empty, load threads for the other `empty` ones, the store thread for
// `staged` ones.
template <class C>
struct Barriers {
  static constexpr int ring_slots = Shared<C>::stages * stage_slots;
  enum Place : int {
    q_full_at,
    q_empty_at,
    k_full_at,
    k_empty_at,
    gates_full_at,
    gates_empty_at,
    ds_empty_at,
    dk_staged_at,
    dq_staged_at,
    ring_full_at,
    ring_empty_at = ring_full_at + ring_slots,
    count = ring_empty_at + ring_slots
  };
  unsigned memory;

  __device__ __forceinline__ unsigned at(int number) const { return memory + Shared<C>::barriers + 8 * number; }
  __device__ __forceinline__ unsigned q_full() const { return at(q_full_at); }
  __device__ __forceinline__ unsigned q_empty() const { return at(q_empty_at); }
  __device__ __forceinline__ unsigned k_full() const { return at(k_full_at); }
  __device__ __forceinline__ unsigned k_empty() const { return at(k_empty_at); }
  __device__ __forceinline__ unsigned gates_full() const { return at(gates_full_at); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(gates_empty_at); }
  __device__ __forceinline__ unsigned ds_empty() const { return at(ds_empty_at); }
  __device__ __forceinline__ unsigned dk_staged() const { return at(dk_staged_at); }
  __device__ __forceinline__ unsigned dq_staged() const { return at(dq_staged_at); }
  __device__ __forceinline__ unsigned ring_full(int slot) const { return at(ring_full_at + slot); }
  __device__ __forceinline__ unsigned ring_empty(int slot) const { return at(ring_empty_at + slot); }

  // Math warpgroup 0 leaves its dK in Q and math warpgroup 1 in K: there the store thread arrives in its place.
  __device__ void init() const {
    constexpr int resident_warps = C::dots_only ? C::math_warps : warpgroup_warps + 1;
    arch::barrier_init(gates_full(), warp_threads);
    for (const unsigned full : {q_full(), k_full()}) arch::barrier_init(full, 1);
    for (const unsigned empty : {q_empty(), k_empty()}) arch::barrier_init(empty, resident_warps * arch::warp_arrivals);
    arch::barrier_init(gates_empty(), C::math_warps * arch::warp_arrivals);
    arch::barrier_init(ds_empty(), 1);
    for (const unsigned staged : {dk_staged(), dq_staged()})
      arch::barrier_init(staged, C::math_warps * arch::warp_arrivals);
    for (int slot = 0; slot < ring_slots; ++slot) {
      arch::barrier_init(ring_full(slot), 1);
      arch::barrier_init(ring_empty(slot), C::math_warps * arch::warp_arrivals);
    }
  }
};

// ds_written, ds_read: by math warpgroup 0, for math warpgroup 1.
enum NamedBarrier : int { math_0_barrier = 1, ds_written, ds_read, largest_barrier };

template <class C>
inline constexpr unsigned shared_bytes = Shared<C>::barriers + 8 * Barriers<C>::count;

}  // namespace tfla::cuda::sm90::grad_qk
