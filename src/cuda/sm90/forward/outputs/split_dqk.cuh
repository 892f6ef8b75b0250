// Forward on Hopper: O and q.n on their way from the kernel of the first part of dqk to that of the last, through
// global memory. Both hold O in the same threads.
#pragma once

#include "cuda/arch/stream.cuh"
#include "cuda/sm90/forward/outputs/token_block.cuh"

namespace tfla::cuda::sm90::forward {

// O is read in two pieces, so that the registers of one are enough.
template <class C>
struct OPiece {
  static constexpr int count = 2, fours = C::columns / 8 / count;
  float4 x[fours];

  __device__ __forceinline__ static float4* of_thread(const TokenBlock<C>& b) {
    return reinterpret_cast<float4*>(b.cta.dqk_partial(b.item, b.number)) + threadIdx.x % warpgroup_threads;
  }
  __device__ __forceinline__ void read(const TokenBlock<C>& b, int piece) {
    const float4* from = of_thread(b) + piece * (fours * warpgroup_threads);
#pragma unroll
    for (int i = 0; i < fours; ++i) x[i] = arch::read_once(from + i * warpgroup_threads);
  }
  __device__ __forceinline__ void add_to(Outputs<C>& o, const float (&factor)[2], int piece) const {
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      float* to = o + 4 * (piece * fours + i);
      to[0] += factor[0] * x[i].x;
      to[1] += factor[0] * x[i].y;
      to[2] += factor[1] * x[i].z;
      to[3] += factor[1] * x[i].w;
    }
  }
};

template <class C>
__device__ __forceinline__ void leave_partial(const TokenBlock<C>& b, const Outputs<C>& o, const Rows<C>& rows) {
  float4* to = OPiece<C>::of_thread(b);
#pragma unroll
  for (int x = 0; x < C::columns / 8; ++x)
    arch::write_once(to + x * warpgroup_threads, {o[4 * x], o[4 * x + 1], o[4 * x + 2], o[4 * x + 3]});
  if (!C::normalized) return;
  const Lane here = Lane::again();
  if (here.pair != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    b.cta.dqk_partial(b.item, b.number)[DqkPartial<C>::o_floats + here.row + 8 * h] = rows.qn[h];
}

template <class C>
__device__ __forceinline__ void read_first_qn(const TokenBlock<C>& b, Rows<C>& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    rows.first_qn[h] =
        arch::read_once(b.cta.dqk_partial(b.item, b.number) + DqkPartial<C>::o_floats + b.here().row + 8 * h);
}

}  // namespace tfla::cuda::sm90::forward
