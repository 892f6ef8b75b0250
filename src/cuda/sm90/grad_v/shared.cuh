// grad_v: the arguments of the kernel, its tiles, shared memory and barriers.
#pragma once

#include <cuda.h>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/gates.cuh"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/grad_v/config.h"

namespace tfla::cuda::sm90::grad_v {

struct Maps {
  CUtensorMap q, k;    // boxes of 128 tokens
  CUtensorMap dh, dv;  // of 64
  CUtensorMap dC;      // of 64 rows
};
template <class C>
using MapsOf = MapsFor<Maps, C::packed>;

// The rest of the call.
struct Work {
  Chunks chunks;
  int depth;  // panels of 64 columns of dqk
  ColumnTiles tiles;
  int dhv;
  int state_tiles, state_columns;  // float16: tiles of dC that have a scale of their own, in all and side by side
};

// `C::panels` x 64 columns of dhv of a chunk of a head. All tiles of a chunk read Q and K.
template <class C>
struct ColumnTile : Tile<C::packed> {
  int column;  // first one

  __device__ __forceinline__ ColumnTile(const Work& work, unsigned tile)
      : Tile<C::packed>(work.chunks, work.tiles.chunk_of(tile)),
        column(static_cast<int>(work.tiles.column_tile_of(tile)) * C::panels * panel) {}
};

// Shared memory, in bytes. The ring takes these items for a tile: (K_0, Q_0), dC_0, (K_1, Q_1), dC_1, ..., dH of token
// block 0, dH of token block 1.
struct Shared {
  static constexpr int ring_slots = 6;  // 7 have room, but bring the tiles of a chunk further apart: 2 % slower
  static constexpr unsigned slot_bytes = 2 * chunk_panel_bytes;

  static constexpr unsigned ring = 0;
  using Gates = GateShared<ring + ring_slots * slot_bytes>;
  static constexpr unsigned barriers = Gates::end;
};

// Math warpgroups wait for `full` barriers, the load thread for `empty` ones, the store thread for `staged` ones.
struct Barriers {
  static constexpr int ring_slots = Shared::ring_slots;
  enum Place : int {
    gates_full_at,
    gates_empty_at,
    staged_at,
    ring_full_at = staged_at + 4,
    ring_empty_at = ring_full_at + ring_slots,
    count = ring_empty_at + ring_slots
  };
  unsigned memory;

  __device__ __forceinline__ unsigned at(int number) const { return memory + Shared::barriers + 8 * number; }
  __device__ __forceinline__ unsigned gates_full() const { return at(gates_full_at); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(gates_empty_at); }
  // One for each token block and for even and odd tiles. With one panel of dqk a tile has fewer items than the ring has
  // slots, and a second tile may be staged before the store thread has seen the first: a barrier for both would then be
  // two phases on, which looks as if nothing had been staged.
  __device__ __forceinline__ unsigned staged(int block, unsigned tile) const {
    return at(staged_at + block) + 16 * (tile & 1);
  }
  __device__ __forceinline__ unsigned ring_full(int slot) const { return at(ring_full_at + slot); }
  __device__ __forceinline__ unsigned ring_empty(int slot) const { return at(ring_empty_at + slot); }

  // Every math warp arrives for a slot to be empty; for a slot that dV leaves through, the store thread arrives in the
  // place of the first of them (see ChunkLane::leads_but_first).
  template <class C>
  __device__ void init() const {
    constexpr unsigned arrivals = C::math_warps * arch::warp_arrivals;
    arch::barrier_init(gates_full(), warp_threads);
    arch::barrier_init(gates_empty(), arrivals);
    for (int x = 0; x < 4; ++x) arch::barrier_init(staged(x % 2, x / 2), arrivals / 2);
    for (int slot = 0; slot < ring_slots; ++slot) {
      arch::barrier_init(ring_full(slot), 1);
      arch::barrier_init(ring_empty(slot), arrivals);
    }
  }
};

enum NamedBarrier : int { dh_read = 1, math_0_barrier };

inline constexpr unsigned shared_bytes = Shared::barriers + 8 * Barriers::count;
static_assert(shared_bytes <= cta_shared_bytes, "what a CTA may have");

}  // namespace tfla::cuda::sm90::grad_v
