// Kernels along the chain of states: their shared memory, and their barriers.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/delta/chain/config.h"

namespace tfla::cuda::sm90::delta_rule {

// Offsets in shared memory. A slot has the operands of a tile: Q, K, V or dH, and what solve made. H and dV leave
// through the place of V and dH.
template <class C>
struct ChainShared {
  static constexpr unsigned key_bytes = C::key_panels * panel_bytes;
  static constexpr unsigned q = 0, k = q + (C::reads_queries ? key_bytes : 0), v = k + key_bytes,
                            solved = v + C::chains * panel_bytes;
  static constexpr unsigned slot_bytes = solved + solved_bytes;
  static constexpr int score_slots = 2;

  static constexpr unsigned scores = C::slots * slot_bytes;
  static constexpr unsigned barriers = scores + score_slots * panel_bytes;
  enum Place : int {
    full_at,
    empty_at = full_at + C::slots,
    scored_at = empty_at + C::slots,
    taken_at = scored_at + score_slots,
    count = taken_at + score_slots
  };
  static constexpr unsigned bytes = barriers + 8 * count;
  static_assert(bytes <= cta_shared_bytes);

  unsigned memory;

  [[nodiscard]] __device__ __forceinline__ unsigned slot(int number) const { return memory + number * slot_bytes; }
  [[nodiscard]] __device__ __forceinline__ unsigned score_slot(int number) const {
    return memory + scores + number * panel_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ unsigned at(int place) const { return memory + barriers + 8 * place; }
  [[nodiscard]] __device__ __forceinline__ unsigned full(int number) const { return at(full_at + number); }
  [[nodiscard]] __device__ __forceinline__ unsigned empty(int number) const { return at(empty_at + number); }
  [[nodiscard]] __device__ __forceinline__ unsigned scored(int number) const { return at(scored_at + number); }
  [[nodiscard]] __device__ __forceinline__ unsigned taken(int number) const { return at(taken_at + number); }

  // A slot is empty when the warps of the scores have read it, and each chain has, whose H or dV has left it.
  __device__ void init() const {
    for (int x = 0; x < C::slots; ++x) {
      arch::barrier_init(full(x), 1);
      arch::barrier_init(empty(x), (C::makes_scores ? warpgroup_warps * arch::warp_arrivals : 0) + C::chains);
    }
    for (int x = 0; x < score_slots; ++x) {
      arch::barrier_init(scored(x), warpgroup_warps * arch::warp_arrivals);
      arch::barrier_init(taken(x), C::chains * warpgroup_warps * arch::warp_arrivals);
    }
  }
};

// turn_of_0, turn_of_1: chains multiply by the state in turns. done_0, done_1: a chain has read a
// slot, and staged what leaves it.
enum NamedBarrier : int { turn_of_0 = 1, turn_of_1, done_0, done_1 };

}  // namespace tfla::cuda::sm90::delta_rule
