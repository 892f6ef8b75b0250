// Stage `gradients` on Hopper: the call as its kernel sees it, tiles, shared memory and barriers.
#pragma once

#include <cuda.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::gradients {

using namespace scores;

inline constexpr int threads = 3 * warpgroup;
inline constexpr int consumer_warps = 8;
// 504 in all: what 384 threads at 168 own.
inline constexpr int producer_registers = 24, consumer_registers = 240;

struct Maps {
  CUtensorMap q, k, v, dh, dk, dv;  // boxes of 128 tokens
  CUtensorMap dq;                   // of 64
  CUtensorMap C, dC;                // of all rows of a state
};
struct PackedMaps : Maps {
  CUtensorMap nothing;
};
template <bool Packed>
using MapsOf = std::conditional_t<Packed, PackedMaps, Maps>;

// The rest of the call.
struct Work {
  Chunks chunks;
  float* row_sums;
  float* column_sums;
  float* outflow;
  Wholes tiles;
  int dhv;
};

// Panels of 64 columns that dqk and dhv take.
template <int Dqk, int Dhv>
struct Panels {
  static constexpr int dqk = Dqk, dhv = Dhv;
};

// Items of the ring in a tile: dC_0, V_0, dC_1, V_1, ..., C_0, C_1, ..., and two slots that stay empty for dS.
template <class Size>
struct Plan {
  static constexpr int ring_slots = 6;  // all of C and dS for dhv 256
  static constexpr int ring_items = 3 * Size::dhv + 2;
  static constexpr int even_factor = std::countr_zero(static_cast<unsigned>(ring_items));
  static constexpr int dk_slot = Size::dhv - Size::dqk;  // dK leaves through the last slots of dH
  static_assert(dk_slot >= 0);

  static constexpr unsigned q = 0;
  static constexpr unsigned k = q + Size::dqk * slot_bytes;
  static constexpr unsigned dh = k + Size::dqk * slot_bytes;
  static constexpr unsigned ring = dh + Size::dhv * slot_bytes;
  using Gates = GatePlan<ring + ring_slots * slot_bytes>;
  static constexpr unsigned largest = (Gates::end + 15) / 16 * 16;  // float16: the largest numbers of warps
  static constexpr unsigned barriers = largest + 2 * 4 * consumer_warps;
};

// Barriers of a tile. `full` ones are waited for by consumers, `empty` ones by producers, `staged` ones by the store
// warp.
template <class Size>
struct Barriers {
  static constexpr int ring_slots = Plan<Size>::ring_slots, dh_slots = Size::dhv;
  static constexpr int jobs = Size::dhv + 2;  // of the store warp: panels of dV, dK, dQ
  static constexpr int dk_job = Size::dhv, dq_job = Size::dhv + 1;
  static constexpr int count = 6 + 2 * dh_slots + 2 * ring_slots + jobs;
  unsigned base;

  __device__ __forceinline__ unsigned at(int index) const { return base + 8 * index; }
  __device__ __forceinline__ unsigned q_full() const { return at(0); }
  __device__ __forceinline__ unsigned q_empty() const { return at(1); }
  __device__ __forceinline__ unsigned k_full() const { return at(2); }
  __device__ __forceinline__ unsigned k_empty() const { return at(3); }
  __device__ __forceinline__ unsigned gates_full() const { return at(4); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(5); }
  __device__ __forceinline__ unsigned dh_full(int t) const { return at(6 + t); }
  __device__ __forceinline__ unsigned dh_empty(int t) const { return at(6 + dh_slots + t); }
  __device__ __forceinline__ unsigned ring_full(int s) const { return at(6 + 2 * dh_slots + s); }
  __device__ __forceinline__ unsigned ring_empty(int s) const { return at(6 + 2 * dh_slots + ring_slots + s); }
  __device__ __forceinline__ unsigned staged(int job) const { return at(6 + 2 * dh_slots + 2 * ring_slots + job); }

  // By one thread. Every consumer warp empties a slot; where a result leaves through it, the store warp does so in
  // place of the first of them, when the result is read.
  __device__ void init() const {
    constexpr unsigned arrivals = consumer_warps * arch::warp_arrivals;
    arch::barrier_init(gates_full(), 32);
    for (const unsigned full : {q_full(), k_full()}) arch::barrier_init(full, 1);
    for (const unsigned empty : {q_empty(), k_empty(), gates_empty()}) arch::barrier_init(empty, arrivals);
    for (int t = 0; t < dh_slots; ++t) {
      arch::barrier_init(dh_full(t), 1);
      arch::barrier_init(dh_empty(t), arrivals);
    }
    for (int s = 0; s < ring_slots; ++s) {
      arch::barrier_init(ring_full(s), 1);
      arch::barrier_init(ring_empty(s), arrivals);
    }
    for (int job = 0; job < jobs; ++job) arch::barrier_init(staged(job), arrivals);
    arch::barriers_ready();
  }
};

template <class Size>
inline constexpr unsigned shared_bytes = Plan<Size>::barriers + 8 * Barriers<Size>::count;
static_assert(shared_bytes<Panels<2, 4>> <= cta_shared_bytes, "what a CTA may have");

}  // namespace tfla::cuda::sm90::gradients
