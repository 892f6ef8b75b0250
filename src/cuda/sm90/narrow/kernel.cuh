// Stage `gradients` on Hopper for narrow heads: the kernel and its launch. See narrow.cu.
#pragma once

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm90/narrow/consumer.cuh"
#include "cuda/sm90/narrow/producers.cuh"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90::narrow {

enum class Producer : std::uint8_t { tensors, results, gates };  // of a warp

template <class T, int Width, bool Packed>
__global__ void __launch_bounds__(threads, residents)
    narrow_gradients_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  const Barriers barriers{memory + Plan::barriers};
  if (!begin<Packed>(work.chunks, work.tiles, [&] { barriers.init(); })) return;
  switch (role()) {
    case Role::producers: {
      arch::fewer_registers<producer_registers>();
      const bool first_lane = threadIdx.x % 32 == 0;
      switch (static_cast<Producer>(threadIdx.x / 32)) {
        case Producer::tensors:
          if (first_lane) load_tensors<Packed>(maps, work, memory);
          break;
        case Producer::results:
          if (first_lane) store_results<Packed>(maps, work, memory);
          break;
        case Producer::gates:
          load_gates<Plan::Gates, Packed>(work.chunks, work.tiles, memory, barriers.full(Barriers::gates),
                                          barriers.staged(Barriers::dv), [](unsigned) { return 0; });
          break;
      }
      break;
    }
    case Role::consumer_0:
      arch::more_registers<consumer_0_registers>();
      Consumer<T, Width, 0>(work, memory).run();
      break;
    case Role::consumer_1:
      arch::more_registers<consumer_1_registers>();
      Consumer<T, Width, 1>(work, memory).run();
      break;
  }
#endif
}

inline Maps maps_of(const Call<float>& call) {
  const auto tokens = [&](const Rows& rows, int columns, int box) {
    return token_map(call, rows, call.heads, columns, box);
  };
  const auto states = [&](const void* data) {
    return matrix_map(data, call.numbers * call.heads, call.dqk, call.padded_dhv(), panel);
  };
  return {.q = tokens(call.q, call.dqk, chunk),
          .k = tokens(call.k, call.dqk, chunk),
          .v = tokens(call.v, call.dhv, chunk),
          .dh = tokens(call.dh, call.dhv, chunk),
          .dk = tokens(call.dk, call.dqk, chunk),
          .dv = tokens(call.dv, call.dhv, half),
          .dq = tokens(call.dq, call.dqk, half),
          .C = states(call.states),
          .dC = states(call.dstates)};
}

template <class T, int Width>
void launch(const Call<float>& call, cudaStream_t stream) {
  const Work work{.chunks = Chunks(call),
                  .row_sums = call.row_sums,
                  .column_sums = call.column_sums,
                  .outflow = call.outflow,
                  .tiles = {static_cast<unsigned>(call.numbers * call.heads)}};
  const std::int64_t blocks = std::min<std::int64_t>(work.tiles.tiles, residents * multiprocessors());
  const auto kernel =
      call.cu_seqlens != nullptr ? narrow_gradients_kernel<T, Width, true> : narrow_gradients_kernel<T, Width, false>;
  launch_chained("narrow_gradients", kernel, blocks, threads, shared_bytes, stream, maps_of(call), work);
}

}  // namespace tfla::cuda::sm90::narrow
