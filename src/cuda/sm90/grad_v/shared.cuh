// Stage `values` on Hopper: the call as its kernel sees it, tiles, shared memory and barriers.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::values {

using namespace scores;

inline constexpr int threads = 3 * warpgroup;
inline constexpr int consumer_warps = 8;
// 504 in all: what 384 threads at 168 own.
inline constexpr int producer_registers = 24, consumer_registers = 240;

struct Maps {
  CUtensorMap q, k;    // boxes of 128 tokens
  CUtensorMap dh, dv;  // of 64
  CUtensorMap dC;      // of 64 rows
};
struct PackedMaps : Maps {
  CUtensorMap nothing;
};
template <bool Packed>
using MapsOf = std::conditional_t<Packed, PackedMaps, Maps>;

// The rest of the call.
struct Work {
  Chunks chunks;
  int depth;  // panels of 64 that dqk takes
  Parts parts;
  int dhv;
  int state_tiles, state_columns;  // of dC, in all and side by side (float16)
};

// A part of `Panels` x 64 columns of dhv of a chunk and head. All parts of it read Q and K.
template <int Panels, bool Packed>
struct Part : Tile<Packed> {
  int column;  // first one

  __device__ __forceinline__ Part(const Work& work, unsigned tile)
      : Tile<Packed>(work.chunks, work.parts.chunk_of(tile)),
        column(static_cast<int>(work.parts.part_of(tile)) * Panels * panel) {}
};

// Items of the ring in a tile: (K_0, Q_0), dC_0, (K_1, Q_1), dC_1, ..., dH of queries 0..63, dH of queries 64..127.
struct Plan {
  static constexpr int ring_slots = 6;  // 7 have room, but bring parts of a chunk further apart: 2 % slower
  static constexpr unsigned room = 2 * slot_bytes;

  static constexpr unsigned ring = 0;
  using Gates = GatePlan<ring + ring_slots * room>;
  static constexpr unsigned barriers = Gates::end;
};

// `full` ones are waited for by consumers, `empty` ones by producers, `staged` ones by the store warp.
struct Barriers {
  static constexpr int ring_slots = Plan::ring_slots;
  static constexpr int count = 6 + 2 * ring_slots;
  unsigned base;

  __device__ __forceinline__ unsigned at(int index) const { return base + 8 * index; }
  __device__ __forceinline__ unsigned gates_full() const { return at(0); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(1); }
  // Tiles in turn have their own. With one panel of dqk a tile has fewer items than the ring has slots, and a second
  // tile may be staged before the store warp has seen the first: one barrier for all would then be two phases on,
  // which looks as if nothing had been staged.
  __device__ __forceinline__ unsigned staged(int consumer, unsigned tile) const {
    return at(2 + consumer) + 16 * (tile & 1);
  }
  __device__ __forceinline__ unsigned ring_full(int s) const { return at(6 + s); }
  __device__ __forceinline__ unsigned ring_empty(int s) const { return at(6 + ring_slots + s); }

  // By one thread. Every consumer warp empties a slot; where a result leaves through it, the store warp does so in
  // place of the first of them, when the result is read.
  __device__ void init() const {
    constexpr unsigned arrivals = consumer_warps * arch::warp_arrivals;
    arch::barrier_init(gates_full(), 32);
    arch::barrier_init(gates_empty(), arrivals);
    for (int x = 0; x < 4; ++x) arch::barrier_init(staged(x % 2, x / 2), arrivals / 2);
    for (int s = 0; s < ring_slots; ++s) {
      arch::barrier_init(ring_full(s), 1);
      arch::barrier_init(ring_empty(s), arrivals);
    }
    arch::barriers_ready();
  }
};

inline constexpr unsigned shared_bytes = Plan::barriers + 8 * Barriers::count;
static_assert(shared_bytes <= cta_shared_bytes, "what a CTA may have");

}  // namespace tfla::cuda::sm90::values
