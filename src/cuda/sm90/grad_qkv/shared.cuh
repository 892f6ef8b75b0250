// grad_qkv: the arguments of the kernel, its shared memory and its barriers.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/gates.cuh"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/grad_qkv/config.h"

namespace tfla::cuda::sm90::grad_qkv {

struct Maps {
  CUtensorMap q, k, v, dh, dk, dv;  // boxes of 128 tokens
  CUtensorMap dq;                   // of 64
  CUtensorMap C, dC;                // of all rows of a state
};
template <class C>
using MapsOf = MapsFor<Maps, C::packed>;

// The rest of the call.
struct Work {
  Chunks chunks;
  float* row_sums;
  float* column_sums;
  float* outflow;
  WholeTiles tiles;
  int dhv;
};

// Shared memory, in bytes. Q, K and dH stay for a whole tile. The ring takes these items for a tile, in panels of 64
// columns: dC_0, V_0, dC_1, V_1, ..., C_0, C_1, ..., and two slots that are left empty for dS.
template <class C>
struct Shared {
  static constexpr int ring_slots = 6;  // all of C and dS for dhv 256
  static constexpr int ring_items = 3 * C::dhv_panels + 2;
  static constexpr int even_factor = std::countr_zero(static_cast<unsigned>(ring_items));
  // dK leaves through the last slots of dH. Where dK has more panels than dH, all of dH's slots are among them, and no
  // dH is loaded into the others.
  static constexpr int dh_slots = std::max(C::dhv_panels, C::dqk_panels);
  static constexpr int dk_slot = dh_slots - C::dqk_panels;

  static constexpr unsigned q = 0;
  static constexpr unsigned k = q + C::dqk_panels * chunk_panel_bytes;
  static constexpr unsigned dh = k + C::dqk_panels * chunk_panel_bytes;
  static constexpr unsigned ring = dh + dh_slots * chunk_panel_bytes;
  using Gates = GateShared<ring + ring_slots * chunk_panel_bytes>;
  static constexpr unsigned largest = (Gates::end + 15) / 16 * 16;  // float16: see largest_of_warps
  static constexpr unsigned barriers = largest + 2 * 4 * C::math_warps;
};

// Math warpgroups wait for `full` barriers, load threads for `empty` ones, the store thread for `staged` ones.
template <class C>
struct Barriers {
  static constexpr int ring_slots = Shared<C>::ring_slots, dh_slots = C::dhv_panels;
  enum Result : int { dv_0, dk = C::dhv_panels, dq, results };  // panels of dV, dK, dQ
  enum Place : int {
    q_full_at,
    q_empty_at,
    k_full_at,
    k_empty_at,
    gates_full_at,
    gates_empty_at,
    dh_full_at,
    dh_empty_at = dh_full_at + dh_slots,
    ring_full_at = dh_empty_at + dh_slots,
    ring_empty_at = ring_full_at + ring_slots,
    staged_at = ring_empty_at + ring_slots,
    count = staged_at + results
  };
  unsigned memory;

  __device__ __forceinline__ unsigned at(int number) const { return memory + Shared<C>::barriers + 8 * number; }
  __device__ __forceinline__ unsigned q_full() const { return at(q_full_at); }
  __device__ __forceinline__ unsigned q_empty() const { return at(q_empty_at); }
  __device__ __forceinline__ unsigned k_full() const { return at(k_full_at); }
  __device__ __forceinline__ unsigned k_empty() const { return at(k_empty_at); }
  __device__ __forceinline__ unsigned gates_full() const { return at(gates_full_at); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(gates_empty_at); }
  __device__ __forceinline__ unsigned dh_full(int t) const { return at(dh_full_at + t); }
  __device__ __forceinline__ unsigned dh_empty(int t) const { return at(dh_empty_at + t); }
  __device__ __forceinline__ unsigned ring_full(int slot) const { return at(ring_full_at + slot); }
  __device__ __forceinline__ unsigned ring_empty(int slot) const { return at(ring_empty_at + slot); }
  __device__ __forceinline__ unsigned staged(int result) const { return at(staged_at + result); }

  // Every math warp arrives for a slot to be empty; for a slot that a result leaves through, the store thread arrives
  // in the place of the first of them (see ChunkLane::leads_but_first).
  __device__ void init() const {
    constexpr unsigned arrivals = C::math_warps * arch::warp_arrivals;
    arch::barrier_init(gates_full(), warp_threads);
    for (const unsigned full : {q_full(), k_full()}) arch::barrier_init(full, 1);
    for (const unsigned empty : {q_empty(), k_empty(), gates_empty()}) arch::barrier_init(empty, arrivals);
    for (int t = 0; t < dh_slots; ++t) {
      arch::barrier_init(dh_full(t), 1);
      arch::barrier_init(dh_empty(t), arrivals);
    }
    for (int slot = 0; slot < ring_slots; ++slot) {
      arch::barrier_init(ring_full(slot), 1);
      arch::barrier_init(ring_empty(slot), arrivals);
    }
    for (int result = 0; result < results; ++result) arch::barrier_init(staged(result), arrivals);
  }
};

enum NamedBarrier : int { math_0_barrier = 1, math_1_barrier, ds_written, largest_barrier };

template <class C>
inline constexpr unsigned shared_bytes = Shared<C>::barriers + 8 * Barriers<C>::count;

}  // namespace tfla::cuda::sm90::grad_qkv
