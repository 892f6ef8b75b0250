// grad_qkv: dQ, dK, dV of heads of dqk to 128 and dhv to 256, in bfloat16 and float16.
//
// A tile is a chunk of 128 tokens of one head; every multiprocessor has one CTA, which makes one tile after the other.
//
//   warpgroup 0   warp 0, one thread   loads V, C and dC into a ring, in panels of 64 columns
//                 warp 1, one thread   loads Q, K and dH, which stay for the whole tile
//                 warp 2, one thread   stores dV, dK, dQ
//                 warp 3               loads gate vectors
//   warpgroup 1   math of token block 0: dV, dK of its 64 keys, dQ of its 64 queries
//   warpgroup 2   math of token block 1
//
//   panels:  S = K Q^T -> P        dV_t = abar K dC_t + P^T dH_t       dP += V_t dH_t^T       dK += V_t dC_t^T
//   then:    dP -> dS              dK = abar dK + dS^T Q               dQ = qbar dH C^T + dS K
//
// Scores are computed with keys in rows: P and dS then are register operands of dV and dK. dS goes through shared
// memory once, for dQ. In float16 every row of P has a scale16, and dS of a tile has one.
#pragma once

#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/common/table_rows.h"
#include "cuda/sm90/grad_qkv/load.cuh"
#include "cuda/sm90/grad_qkv/math.cuh"
#include "cuda/sm90/grad_qkv/store.cuh"

namespace tfla::cuda::sm90::grad_qkv {

template <class C>
__device__ __forceinline__ void load_and_store(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  run_warps<OneThread<load_ring<C>>, OneThread<load_resident<C>>, OneThread<store_results<C>>,
            WholeWarp<load_gate_vectors<C>>>(maps, work, memory);
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    grad_qkv_kernel(const __grid_constant__ MapsOf<C> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  TFLA_DYNAMIC_SHARED(panel_alignment, shared);
  const unsigned memory = arch::shared_address(shared);
  begin_kernel([&] { Barriers<C>{memory}.init(); });
  if (!has_tiles<C::packed>(work)) return;
  run_roles<C::load_registers, load_and_store<C>, Math<C, 0>, Math<C, 1>>(maps, work, memory);
#endif
}

template <class C>
Maps maps_of(const Call<float>& call) {
  const Tensors& tensors = call.tensors;
  return {.q = qk_map(call, tensors.q, chunk_tokens),
          .k = qk_map(call, tensors.k, chunk_tokens),
          .v = hv_map(call, tensors.v, chunk_tokens),
          .dh = hv_map(call, tensors.dh, chunk_tokens),
          .dk = grad_qk_map(call, tensors.dk_heads, chunk_tokens),
          .dv = hv_map(call, tensors.dv, chunk_tokens),
          .dq = grad_qk_map(call, tensors.dq_heads, token_block),
          .C = state_map(call, call.stored.C, C::dqk_panels * panel),
          .dC = state_map(call, call.stored.dC, C::dqk_panels * panel)};
}

template <class C>
void launch_config(const Call<float>& call, cudaStream_t stream) {
  static_assert(shared_bytes<C> <= cta_shared_bytes, "what a CTA may have");
  const Work work{.chunks = Chunks(call),
                  .row_sums = call.sums.rows,
                  .column_sums = call.sums.columns,
                  .outflow = call.sums.outflow,
                  .tiles = WholeTiles(call),
                  .dhv = call.dims.dhv};
  launch_chained("grad_qkv", grad_qkv_kernel<C>, ctas_for(work.tiles.tiles), C::threads, shared_bytes<C>, stream,
                 add_nothing<C::packed>(maps_of<C>(call), call, chunk_tokens), work);
}

template <class T>
void launch(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  with_row<Kernel::grad_qkv, T>(tile, [&](auto row) {
    using Row = decltype(row);
    launch_by_packing(call, [&](auto packed) {
      constexpr Options options{
          .dqk_panels = Row::rows / panel, .dhv_panels = Row::columns / panel, .packed = decltype(packed)::value};
      launch_config<Config<T, options>>(call, stream);
    });
  });
}

}  // namespace tfla::cuda::sm90::grad_qkv
