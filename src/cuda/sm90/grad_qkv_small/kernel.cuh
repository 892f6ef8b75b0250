// Stage `gradients` on Hopper for narrow heads: the kernel and its launch. See narrow.cu.
#pragma once

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/grad_qkv_small/load.cuh"
#include "cuda/sm90/grad_qkv_small/math.cuh"

namespace tfla::cuda::sm90::narrow {

enum class Producer : std::uint8_t { tensors, results, gates };  // of a warp

template <class T, int Width, bool Packed>
__global__ void __launch_bounds__(threads, residents)
    narrow_gradients_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  const Barriers barriers{memory + Plan::barriers};
  begin_kernel([&] { barriers.init(); });
  if (Packed && first_tile<Packed>(work.chunks, work.tiles) >= work.tiles.tiles) return;
  run_roles(role<producer_registers>([&] {
              run_warps(one_thread([&] { load_tensors<Packed>(maps, work, memory); }),
                        one_thread([&] { store_results<Packed>(maps, work, memory); }), whole_warp([&] {
                          load_gates<Plan::Gates, Packed>(work.chunks, work.tiles, memory,
                                                          barriers.full(Barriers::gates), barriers.staged(Barriers::dv),
                                                          [](unsigned) { return 0; });
                        }));
            }),
            role<consumer_0_registers>([&] { Consumer<T, Width, 0>(work, memory).run(); }),
            role<consumer_1_registers>([&] { Consumer<T, Width, 1>(work, memory).run(); }));
#endif
}

inline Maps maps_of(const Call<float>& call) {
  const auto tokens = [&](const Strided& rows, int columns, int box) {
    return token_map(call, rows, call.dims.heads, columns, box);
  };
  const auto states = [&](const void* data) {
    return matrix_map(data, call.dims.chunk_count * call.dims.heads, call.dims.dqk, call.dims.padded_dhv(), panel);
  };
  return {.q = tokens(call.tensors.q, call.dims.dqk, chunk),
          .k = tokens(call.tensors.k, call.dims.dqk, chunk),
          .v = tokens(call.tensors.v, call.dims.dhv, chunk),
          .dh = tokens(call.tensors.dh, call.dims.dhv, chunk),
          .dk = tokens(call.tensors.dk, call.dims.dqk, chunk),
          .dv = tokens(call.tensors.dv, call.dims.dhv, half),
          .dq = tokens(call.tensors.dq, call.dims.dqk, half),
          .C = states(call.stored.C),
          .dC = states(call.stored.dC)};
}

template <class T, int Width>
void launch(const Call<float>& call, cudaStream_t stream) {
  const Work work{.chunks = Chunks(call),
                  .row_sums = call.sums.rows,
                  .column_sums = call.sums.columns,
                  .outflow = call.sums.outflow,
                  .tiles = {static_cast<unsigned>(call.dims.chunk_count * call.dims.heads)}};
  const std::int64_t blocks = std::min<std::int64_t>(work.tiles.tiles, residents * multiprocessors());
  const auto kernel = call.packing.cu_seqlens != nullptr ? narrow_gradients_kernel<T, Width, true>
                                                         : narrow_gradients_kernel<T, Width, false>;
  launch_chained("narrow_gradients", kernel, blocks, threads, shared_bytes, stream, maps_of(call), work);
}

}  // namespace tfla::cuda::sm90::narrow
