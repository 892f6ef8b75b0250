// Stage `gradients` on Hopper for narrow heads: the call as its kernel sees it, shared memory and barriers.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::narrow {

using namespace scores;

inline constexpr int threads = 3 * warpgroup;
inline constexpr int residents = 2;  // blocks of a multiprocessor
inline constexpr int consumer_warps = 8;
// 240 in all: what 384 threads at 80 own.
inline constexpr int producer_registers = 24, consumer_0_registers = 120, consumer_1_registers = 96;

struct Maps {
  CUtensorMap q, k, v, dh, dk;  // boxes of 128 tokens
  CUtensorMap dv, dq;           // of 64
  CUtensorMap C, dC;            // of a whole state
};

// The rest of the call.
struct Work {
  Chunks chunks;
  float* row_sums;
  float* column_sums;
  float* outflow;
  Wholes tiles;
};

// Shared memory, in bytes. Every tensor of a tile has one slot: while one block waits for its next tile, the other has
// the tensor cores. dS in three parts of 64 x 64: keys and queries 0..63, 64..127, and keys 0..63 with the others.
struct Plan {
  static constexpr unsigned q = 0, k = q + slot_bytes, v = k + slot_bytes, dh = v + slot_bytes;
  static constexpr unsigned C = dh + slot_bytes, dC = C + half_bytes;
  static constexpr unsigned ds = dC + half_bytes, ds_across = ds + 2 * half_bytes;
  using Gates = GatePlan<ds_across + half_bytes>;
  static constexpr unsigned barriers = Gates::end;
};

// `full`: a tensor has come. `staged`: all consumers have put their part of a result where the store warp takes it
// from, and are done with what they made it of; `stored`: that place is free again.
struct Barriers {
  enum Tensor : std::uint8_t { q, k, v, dh, C, dC, gates, tensors };
  enum Result : std::uint8_t { dk, dq, dv, results };
  static constexpr int count = tensors + 2 * results;
  unsigned base;

  __device__ __forceinline__ unsigned full(Tensor tensor) const { return base + 8 * tensor; }
  __device__ __forceinline__ unsigned staged(Result result) const { return base + 8 * (tensors + result); }
  __device__ __forceinline__ unsigned stored(Result result) const { return base + 8 * (tensors + results + result); }

  // By one thread.
  __device__ void init() const {
    for (int t = 0; t < tensors; ++t) arch::barrier_init(full(static_cast<Tensor>(t)), t == gates ? 32 : 1);
    for (int r = 0; r < results; ++r) {
      arch::barrier_init(staged(static_cast<Result>(r)), consumer_warps * arch::warp_arrivals);
      arch::barrier_init(stored(static_cast<Result>(r)), 1);
    }
  }
};

inline constexpr unsigned shared_bytes = Plan::barriers + 8 * Barriers::count;
static_assert(residents * (shared_bytes + cta_reserved_bytes) <= multiprocessor_shared_bytes, "what a multiprocessor has");

}  // namespace tfla::cuda::sm90::narrow
