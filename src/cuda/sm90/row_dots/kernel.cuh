// row_dots: dh.h of every token, from which grad_n makes deta, the exact gradient of the normalizer; in bfloat16 and
// float16.
//
// h is linear in q but for the denominator: dh_t.h_t = sum_s S_ts D_ts dP_ts + q_t.dQ_t, where dQ is what comes through
// the incoming state. Scores and their gradients meet in float32. q.dq as grad_qk leaves it would be the same, but for
// the rounding of dS: where one token makes up most of h, the exact gradient is the difference of large numbers, and
// 2e-3 of them too much.
//
// Tiles, shared memory and load warps are those of grad_qk: a chunk of 128 tokens of one head and 128 columns of dqk.
//
//   warpgroup 0   warp 0, one thread   loads V, dH and C into a ring, in panels of 64 columns of dhv
//                 warp 1, one thread   loads Q and K, for the end of the tile
//                 warp 3               loads gate vectors
//   warpgroup 1   math of token block 0
//   warpgroup 2   math of token block 1
#pragma once

#include "cuda/arch/dynamic_shared.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/grad_qk/load.cuh"
#include "cuda/sm90/grad_qk/work.h"
#include "cuda/sm90/row_dots/config.h"
#include "cuda/sm90/row_dots/math.cuh"

namespace tfla::cuda::sm90::row_dots {

using grad_qk::MapsOf, grad_qk::Work;

template <class C>
__device__ __forceinline__ void load_and_store(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  run_warps<OneThread<grad_qk::load_panels<C>>, OneThread<grad_qk::load_resident<C>>, Idle,
            WholeWarp<grad_qk::load_gate_vectors<C>>>(maps, work, memory);
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    row_dots_kernel(const __grid_constant__ MapsOf<C> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  TFLA_DYNAMIC_SHARED(panel_alignment, shared);
  const unsigned memory = arch::shared_address(shared);
  begin_kernel([&] { Barriers<C>{memory}.init(); });
  if (!has_tiles<C::packed>(work)) return;
  run_roles<C::load_registers, load_and_store<C>, Math<C, 0>, Math<C, 1>>(maps, work, memory);
#endif
}

template <class T>
void launch(const Call<float>& call, cudaStream_t stream) {
  launch_by_packing(call, [&](auto packed) {
    using C = Config<T, Options{.packed = decltype(packed)::value}>;
    grad_qk::launch_tiles<C>("row_dots", row_dots_kernel<C>, call, stream);
  });
}

}  // namespace tfla::cuda::sm90::row_dots
