// grad_qk_reverse: dQ and dK of heads of dqk to 128 and dhv to 256, with dC on the chip.
//
// A CTA owns 64 rows of dqk by all columns of dhv of dC over a segment of a sequence, in registers, and walks through
// its chunks of 128 tokens in reverse time. With 64 rows of dC it has 64 columns of dQ and dK to the end: nothing of
// dC is stored, and no other CTA adds to its results. The CTAs of a head each make dP.
//
//   warpgroup 0   warp 0, one thread   loads Q, and dH, V and C into rings, in panels of 64 columns of dhv
//                 warp 1, one thread   loads K, for the end of the chunk
//                 warp 2, one thread   stores dK, dQ
//                 warp 3               loads gate vectors
//   warpgroup 1   dC and <C, dC>
//   warpgroup 2   math of token block 0: dK of its 64 keys, dQ of its 64 queries
//   warpgroup 3   math of token block 1
//
//   state           dC rounded into shared memory; then panel by panel dC <- gbar dC + (scale qbar / den Q)^T dH
//   math, panels    dP += V dH^T, dQ += dH C^T, dK += V dC^T
//   math, then      dP -> dS      dK = abar dK + dS^T Q      dQ = qbar dQ + dS K
#pragma once

#include "cuda/launch.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/common/table_rows.h"
#include "cuda/sm90/grad_qk_reverse/load.cuh"
#include "cuda/sm90/grad_qk_reverse/math.cuh"
#include "cuda/sm90/grad_qk_reverse/state.cuh"
#include "cuda/sm90/grad_qk_reverse/store.cuh"

namespace tfla::cuda::sm90::grad_qk_reverse {

// The first warpgroup.
template <class C>
__device__ __forceinline__ void load_and_store(const Cta<C>& cta) {
  const Load<C> load{cta};
  switch (static_cast<std::uint8_t>(threadIdx.x / warp_threads)) {
    case 0:
      if (threadIdx.x % warp_threads == 0) load.panels();
      break;
    case 1:
      if (threadIdx.x % warp_threads == 0) load.keys();
      break;
    case 2:
      if (threadIdx.x % warp_threads == 0) Store<C>{cta}.results();
      break;
    default: load.gates(); break;
  }
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    grad_qk_reverse_kernel(const __grid_constant__ typename Cta<C>::Maps maps, const __grid_constant__ Call<float> call,
                           const __grid_constant__ typename Cta<C>::Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(panel_alignment) unsigned char shared[];
  const Cta<C> cta{call, maps, work, arch::shared_address(shared)};
  begin_kernel([&] { cta.barriers().init(); });
  switch (static_cast<std::uint8_t>(threadIdx.x / warpgroup_threads)) {
    case 0:
      arch::fewer_registers<C::load_registers>();
      load_and_store(cta);
      break;
    case 1:
      arch::more_registers<C::state_registers>();
      State<C>{cta}.carry();
      break;
    case 2:
      arch::more_registers<C::math_registers[0]>();
      Math<C, 0>(cta).run();
      break;
    default:
      arch::more_registers<C::math_registers[1]>();
      Math<C, 1>(cta).run();
      break;
  }
#endif
}

inline Maps maps_of(const Call<float>& call) {
  const Tensors& tensors = call.tensors;
  return {.q = qk_map(call, tensors.q, chunk_tokens),
          .k = qk_map(call, tensors.k, chunk_tokens),
          .v = hv_map(call, tensors.v, chunk_tokens),
          .dh = hv_map(call, tensors.dh, chunk_tokens),
          .dq = qk_map(call, tensors.dq, token_block),
          .dk = qk_map(call, tensors.dk, token_block),
          .C = state_map(call, call.stored.C, tile_rows)};
}

template <class C>
void launch_config(const Call<float>& call, cudaStream_t stream) {
  static_assert(shared_bytes<C> <= cta_shared_bytes, "what a CTA may have");
  const int row_tiles = (call.dims.dqk + tile_rows - 1) / tile_rows;
  const int segments = (call.dims.chunks_per_row + call.dims.chunks_per_segment - 1) / call.dims.chunks_per_segment;
  const Work work{.chunks = Chunks(call),
                  .row_tiles = row_tiles,
                  .items = static_cast<int>(call.dims.sequences) * call.dims.heads * segments * row_tiles};
  const auto start = [&](const typename Cta<C>::Work& all, int ctas) {
    launch_chained("grad_qk_reverse", grad_qk_reverse_kernel<C>, ctas, C::threads, shared_bytes<C>, stream,
                   add_nothing<C::packed>(maps_of(call), call, chunk_tokens), call, all);
  };
  if constexpr (C::packed) {
    const Units units(call, call.dims.heads * row_tiles);
    start({work, units, Divider(row_tiles), Divider(call.dims.heads)}, units.ctas);
  } else {
    start(work, std::min(work.items, multiprocessors()));
  }
}

template <class T>
void launch(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  with_row<Kernel::grad_qk_reverse, T>(tile, [&](auto row) {
    using Row = decltype(row);
    launch_by_packing(call, [&](auto packed) {
      constexpr Options options{.dhv_panels = Row::columns / panel, .packed = decltype(packed)::value};
      launch_config<Config<T, options>>(call, stream);
    });
  });
}

}  // namespace tfla::cuda::sm90::grad_qk_reverse
