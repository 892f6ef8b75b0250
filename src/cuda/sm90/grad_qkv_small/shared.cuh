// grad_qkv_small: the arguments of the kernel, its shared memory and its barriers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/gates.cuh"
#include "cuda/sm90/grad_qkv_small/config.h"

namespace tfla::cuda::sm90::grad_qkv_small {

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
  WholeTiles tiles;
};

// Shared memory, in bytes. Every tensor of a tile has one place: while a CTA waits for its next tile, the other CTA of
// the multiprocessor has the tensor cores. dS is in three panels: keys and queries of token block 0; of token block 1;
// keys of block 0 with queries of block 1.
struct Shared {
  static constexpr unsigned q = 0, k = q + chunk_panel_bytes, v = k + chunk_panel_bytes, dh = v + chunk_panel_bytes;
  static constexpr unsigned C = dh + chunk_panel_bytes, dC = C + panel_bytes;
  static constexpr unsigned ds = dC + panel_bytes, ds_across = ds + 2 * panel_bytes;
  using Gates = GateShared<ds_across + panel_bytes>;
  static constexpr unsigned barriers = Gates::end;
};

// `full`: a tensor has come. `staged`: all math warps have put their rows of a result where the store warp takes it
// from, and are done with the operands it was made of. `stored`: the result has left that place.
struct Barriers {
  enum Tensor : std::uint8_t { q, k, v, dh, C, dC, gates, tensors };
  enum Result : std::uint8_t { dk, dq, dv, results };
  static constexpr int count = tensors + 2 * results;
  unsigned memory;

  __device__ __forceinline__ unsigned at(int number) const { return memory + Shared::barriers + 8 * number; }
  __device__ __forceinline__ unsigned full(Tensor tensor) const { return at(tensor); }
  __device__ __forceinline__ unsigned staged(Result result) const { return at(tensors + result); }
  __device__ __forceinline__ unsigned stored(Result result) const { return at(tensors + results + result); }

  template <class C>
  __device__ void init() const {
    for (int t = 0; t < tensors; ++t) arch::barrier_init(full(static_cast<Tensor>(t)), t == gates ? warp_threads : 1);
    for (int r = 0; r < results; ++r) {
      arch::barrier_init(staged(static_cast<Result>(r)), C::math_warps * arch::warp_arrivals);
      arch::barrier_init(stored(static_cast<Result>(r)), 1);
    }
  }
};

enum NamedBarrier : int { math_0_barrier = 1, math_1_barrier, ds_written };

inline constexpr unsigned shared_bytes = Shared::barriers + 8 * Barriers::count;
static_assert(2 * (shared_bytes + cta_reserved_bytes) <= multiprocessor_shared_bytes, "what a multiprocessor has");

}  // namespace tfla::cuda::sm90::grad_qkv_small
