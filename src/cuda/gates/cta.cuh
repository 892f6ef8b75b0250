// The CTAs of the kernels that work on gates: a warp per head, and in it a few neighbouring tokens to a lane.
#pragma once

#include "cuda/common/device.cuh"

namespace tfla::cuda::gates {

inline constexpr int threads = 256;
inline constexpr int heads = threads / warp_size;  // neighbours
inline constexpr int lane_tokens = 4, slab_tokens = lane_tokens * warp_size;

template <class Real>
__host__ __device__ unsigned head_groups(const Call<Real>& call) {
  return (static_cast<unsigned>(call.dims.heads) + heads - 1) / heads;
}

// Numbers of a slab of tokens in shared memory. Threads write them in one order and read them in the other: by heads,
// as vectors lie in memory, and by tokens, as gates do.
template <class Number>
struct Slab {
  static constexpr int row = slab_tokens + 4;  // puts eight heads of four tokens into banks of their own
  alignas(16) Number of[heads][row];
};

// The second order: a thread has head `head` and tokens `place + x * step` of the slab, x from 0 to rounds - 1.
struct ByTokens {
  static constexpr int step = threads / heads, rounds = slab_tokens / step;
  int head, place;

  __device__ ByTokens() : head(static_cast<int>(threadIdx.x) % heads), place(static_cast<int>(threadIdx.x) / heads) {}
};

}  // namespace tfla::cuda::gates
