// grad_qkv_small: dQ, dK, dV of heads of dqk and dhv to 64, in bfloat16.
//
// A tile is a chunk of 128 tokens of one head. A CTA makes one tile after the other; two CTAs share a multiprocessor.
//
//   warpgroup 0   warp 0, one thread   loads Q, K, V, dH, C, dC
//                 warp 1, one thread   stores dK, dQ, dV
//                 warp 2               loads gate vectors
//   warpgroup 1   math of token block 0: dK, dQ, dV of its 64 tokens, one after the other
//   warpgroup 2   math of token block 1
//
// A tile of such heads is little work between many waits: for its tensors, for products of a few steps, for other
// warps. Four math warpgroups on a multiprocessor, each with half the registers, hide them better than two. Scores are
// made, gated and rounded 64 x 64 at a time, and a product begins when the scores it takes are rounded. Shared memory
// holds the tensors of one tile; those of the next tile come as each place becomes free, while the other CTA works.
// Heads to 32 columns multiply only these: half the depth of the scores, and half the columns of the sums.
#pragma once

#include <algorithm>

#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/common/table_rows.h"
#include "cuda/sm90/grad_qkv_small/load.cuh"
#include "cuda/sm90/grad_qkv_small/math.cuh"
#include "cuda/sm90/grad_qkv_small/store.cuh"

namespace tfla::cuda::sm90::grad_qkv_small {

template <class C>
__device__ __forceinline__ void load_and_store(const Maps& maps, const Work& work, unsigned memory) {
  run_warps<OneThread<load_tensors<C>>, OneThread<store_results<C>>, WholeWarp<load_gate_vectors<C>>>(maps, work,
                                                                                                      memory);
}

template <class C>
__global__ void __launch_bounds__(C::threads, C::ctas)
    grad_qkv_small_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  TFLA_DYNAMIC_SHARED(panel_alignment, shared);
  const unsigned memory = arch::shared_address(shared);
  begin_kernel([&] { Barriers{memory}.init<C>(); });
  if (!has_tiles<C::packed>(work)) return;
  run_roles<C::load_registers, load_and_store<C>, Math<C, 0>, Math<C, 1>>(maps, work, memory);
#endif
}

inline Maps maps_of(const Call<float>& call) {
  const Tensors& tensors = call.tensors;
  return {.q = qk_map(call, tensors.q, chunk_tokens),
          .k = qk_map(call, tensors.k, chunk_tokens),
          .v = hv_map(call, tensors.v, chunk_tokens),
          .dh = hv_map(call, tensors.dh, chunk_tokens),
          .dk = grad_qk_map(call, tensors.dk_heads, chunk_tokens),
          .dv = hv_map(call, tensors.dv, token_block),
          .dq = grad_qk_map(call, tensors.dq_heads, token_block),
          .C = state_map(call, call.stored.C, panel),
          .dC = state_map(call, call.stored.dC, panel)};
}

template <class C>
void launch_config(const Call<float>& call, cudaStream_t stream) {
  const Work work{.chunks = Chunks(call),
                  .row_sums = call.sums.rows,
                  .column_sums = call.sums.columns,
                  .outflow = call.sums.outflow,
                  .tiles = WholeTiles(call)};
  launch_chained("grad_qkv_small", grad_qkv_small_kernel<C>, ctas_for(work.tiles.tiles, C::ctas), C::threads,
                 shared_bytes, stream, maps_of(call), work);
}

inline void launch(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  with_row<Kernel::grad_qkv_small, __nv_bfloat16>(tile, [&](auto row) {
    using Row = decltype(row);
    launch_by_packing(call, [&](auto packed) {
      launch_config<Config<Options{.columns = Row::columns, .packed = packed.value}>>(call, stream);
    });
  });
}

}  // namespace tfla::cuda::sm90::grad_qkv_small
