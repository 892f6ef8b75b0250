// grad_qk: dQ and dK of heads of any size, in bfloat16 and float16; also with gradients of n.
//
// A tile is a chunk of 128 tokens of one head and 128 columns of dqk; every multiprocessor has one CTA, which makes one
// tile after the other.
//
//   warpgroup 0   warp 0, one thread   loads V, dH, dC and C into a ring, in panels of 64 columns of dhv
//                 warp 1, one thread   loads Q and K, for the end of the tile
//                 warp 2, one thread   stores dK, dQ
//                 warp 3               loads gate vectors
//   warpgroup 1   math of token block 0: dK of its 64 keys, dQ of its 64 queries
//   warpgroup 2   math of token block 1, and <C, dC> of the tile
//
//   panels of dhv:  dP += V dH^T, dK += V dC^T, dQ += dH C^T
//   then:           dP -> dS      dK = abar dK + dS^T Q      dQ = qbar dQ + dS K
//
// Scores are computed with keys in rows, and dS goes through shared memory for both dK and dQ: three sums leave no
// registers for it as an operand.
#pragma once

#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/grad_qk/load.cuh"
#include "cuda/sm90/grad_qk/math.cuh"
#include "cuda/sm90/grad_qk/store.cuh"
#include "cuda/sm90/grad_qk/work.h"

namespace tfla::cuda::sm90::grad_qk {

template <class C>
__device__ __forceinline__ void load_and_store(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  run_warps<OneThread<load_panels<C>>, OneThread<load_resident<C>>, OneThread<store_results<C>>,
            WholeWarp<load_gate_vectors<C>>>(maps, work, memory);
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    grad_qk_kernel(const __grid_constant__ MapsOf<C> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  TFLA_DYNAMIC_SHARED(panel_alignment, shared);
  const unsigned memory = arch::shared_address(shared);
  begin_kernel([&] { Barriers<C>{memory}.init(); });
  if (!has_tiles<C::packed>(work)) return;
  run_roles<C::load_registers, load_and_store<C>, Math<C, 0>, Math<C, 1>>(maps, work, memory);
#endif
}

// The configuration for a call.
template <class T, bool Norm>
void launch(const Call<float>& call, cudaStream_t stream) {
  launch_by_packing(call, [&](auto packed) {
    using C = Config<T, Options{.norm = Norm, .packed = decltype(packed)::value}>;
    launch_tiles<C>("grad_qk", grad_qk_kernel<C>, call, stream);
  });
}

}  // namespace tfla::cuda::sm90::grad_qk
