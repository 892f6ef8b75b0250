// grad_v: dV = abar (K dC) + P^T dH with P = (Q K^T) . D, of heads that are too large for grad_qkv, in bfloat16 and
// float16.
//
// A tile is a chunk of 128 tokens of one head and up to 256 columns of dhv; every multiprocessor has one CTA, which
// makes one tile after the other.
//
//   warpgroup 0   warp 0, one thread   loads everything into one ring: panels of dqk of K, Q and dC, then dH
//                 warp 1, one thread   stores dV, from where dH was
//                 warp 2               loads gate vectors
//   warpgroup 1   math of the keys of token block 0
//   warpgroup 2   math of the keys of token block 1
//
//   panels of dqk:  S += K Q^T, dV += K dC      then:  S -> P      dV = abar dV + P^T dH
//
// Scores are computed with keys in rows: P then is a register operand.
#pragma once

#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/common/table_rows.h"
#include "cuda/sm90/grad_v/load.cuh"
#include "cuda/sm90/grad_v/math.cuh"
#include "cuda/sm90/grad_v/store.cuh"

namespace tfla::cuda::sm90::grad_v {

template <class C>
__device__ __forceinline__ void load_and_store(const MapsOf<C>& maps, const Work& work, unsigned memory) {
  run_warps<OneThread<load_ring<C>>, OneThread<store_results<C>>, WholeWarp<load_gate_vectors<C>>>(maps, work, memory);
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    grad_v_kernel(const __grid_constant__ MapsOf<C> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  TFLA_DYNAMIC_SHARED(panel_alignment, shared);
  const unsigned memory = arch::shared_address(shared);
  begin_kernel([&] { Barriers{memory}.init<C>(); });
  if (!has_tiles<C::packed>(work)) return;
  run_roles<C::load_registers, load_and_store<C>, Math<C, 0>, Math<C, 1>>(maps, work, memory);
#endif
}

inline Maps maps_of(const Call<float>& call) {
  return {.q = qk_map(call, call.tensors.q, chunk_tokens),
          .k = qk_map(call, call.tensors.k, chunk_tokens),
          .dh = hv_map(call, call.tensors.dh, token_block),
          .dv = hv_map(call, call.tensors.dv, token_block),
          .dC = state_map(call, call.stored.dC, panel)};
}

inline int panels_of(int columns) { return (columns + panel - 1) / panel; }

template <class C>
void launch_config(const Call<float>& call, int tiles_per_chunk, cudaStream_t stream) {
  const std::int64_t ctas = ctas_for(call.dims.chunk_count * call.dims.heads * tiles_per_chunk);
  const Work work{.chunks = Chunks(call),
                  .depth = panels_of(call.dims.dqk),
                  .tiles = ColumnTiles(call, tiles_per_chunk, ctas),
                  .dhv = call.dims.dhv,
                  .state_tiles = static_cast<int>(hopper::state_tiles(call.dims.dqk, call.dims.dhv)),
                  .state_columns = static_cast<int>(hopper::state_columns(call.dims.dhv))};
  launch_chained("grad_v", grad_v_kernel<C>, ctas, C::threads, shared_bytes, stream,
                 add_nothing<C::packed>(maps_of(call), call, token_block), work);
}

template <class T>
void launch(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  with_row<Kernel::grad_v, T>(tile, [&](auto row) {
    using Row = decltype(row);
    constexpr int panels = Row::columns / panel;
    const int tiles = (panels_of(call.dims.dhv) + panels - 1) / panels;
    launch_by_packing(call, [&](auto packed) {
      constexpr bool is_packed = decltype(packed)::value;
      if constexpr ((Row::batches & (is_packed ? tfla::packed : tfla::dense)) != 0)
        launch_config<Config<T, Options{.panels = panels, .packed = is_packed}>>(call, tiles, stream);
    });
  });
}

}  // namespace tfla::cuda::sm90::grad_v
