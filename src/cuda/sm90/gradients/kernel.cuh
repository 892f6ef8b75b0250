// Stage `gradients` on Hopper: the kernel and its launch. See gradients.cu.
#pragma once

#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/gradients/consumer.cuh"
#include "cuda/sm90/gradients/producers.cuh"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90 {

namespace gradients {

enum class Producer : std::uint8_t { ring, resident, results, gates };  // of a warp

template <class T, class Size, bool Packed>
__global__ void __launch_bounds__(threads, 1)
    gradients_kernel(const __grid_constant__ MapsOf<Packed> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  if (!begin<Packed>(work.chunks, work.tiles, [&] { Barriers<Size>{memory + Plan<Size>::barriers}.init(); })) return;
  switch (role()) {
    case Role::producers: {
      arch::fewer_registers<producer_registers>();
      const bool first_lane = threadIdx.x % 32 == 0;
      switch (static_cast<Producer>(threadIdx.x / 32)) {
        case Producer::ring:
          if (first_lane) load_ring<Size, Packed>(maps, work, memory);
          break;
        case Producer::resident:
          if (first_lane) load_resident<Size, Packed>(maps, work, memory);
          break;
        case Producer::results:
          if (first_lane) store_results<Size, Packed>(maps, work, memory);
          break;
        case Producer::gates: {
          const Barriers<Size> barriers{memory + Plan<Size>::barriers};
          load_gates<typename Plan<Size>::Gates, Packed, has_lifts<T>>(work.chunks, work.tiles, memory,
                                                                       barriers.gates_full(), barriers.gates_empty(),
                                                                       [](unsigned) { return 0; });
          break;
        }
      }
      break;
    }
    case Role::consumer_0:
      arch::more_registers<consumer_registers>();
      Consumer<T, Size, 0>(work, memory).run();
      break;
    case Role::consumer_1:
      arch::more_registers<consumer_registers>();
      Consumer<T, Size, 1>(work, memory).run();
      break;
  }
#endif
}

inline constexpr int widest_dqk = 2 * panel, widest_dhv = 4 * panel;  // of one kernel

inline Maps maps_of(const Call<float>& call, int dqk_panels) {
  const auto tokens = [&](const Rows& rows, int columns, int box) {
    return token_map(call, rows, call.heads, columns, box);
  };
  const auto states = [&](const void* data) {
    return matrix_map(data, call.numbers * call.heads, call.dqk, call.padded_dhv(), dqk_panels * panel);
  };
  return {.q = tokens(call.q, call.dqk, chunk),
          .k = tokens(call.k, call.dqk, chunk),
          .v = tokens(call.v, call.dhv, chunk),
          .dh = tokens(call.dh, call.dhv, chunk),
          .dk = tokens(call.dk, call.dqk, chunk),
          .dv = tokens(call.dv, call.dhv, chunk),
          .dq = tokens(call.dq, call.dqk, half),
          .C = states(call.states),
          .dC = states(call.dstates)};
}

inline Work work_of(const Call<float>& call) {
  return {.chunks = Chunks(call),
          .row_sums = call.row_sums,
          .column_sums = call.column_sums,
          .outflow = call.outflow,
          .tiles = {static_cast<unsigned>(call.numbers * call.heads)},
          .dhv = call.dhv};
}

template <class T, class Size>
void launch(const Call<float>& call, cudaStream_t stream) {
  const Work work = work_of(call);
  const std::int64_t blocks = std::min<std::int64_t>(work.tiles.tiles, multiprocessors());
  const Maps maps = maps_of(call, Size::dqk);
  if (call.cu_seqlens != nullptr)
    return launch_chained("gradients", gradients_kernel<T, Size, true>, blocks, threads, shared_bytes<Size>, stream,
                          PackedMaps{maps, nothing_map(call, chunk)}, work);
  launch_chained("gradients", gradients_kernel<T, Size, false>, blocks, threads, shared_bytes<Size>, stream, maps,
                 work);
}

template <class T, int Dqk>
void launch_for_dhv(const Call<float>& call, cudaStream_t stream) {
  switch ((call.dhv + panel - 1) / panel) {
    case 1:
    case 2: launch<T, Panels<Dqk, 2>>(call, stream); break;
    case 3: launch<T, Panels<Dqk, 3>>(call, stream); break;
    default: launch<T, Panels<Dqk, 4>>(call, stream); break;
  }
}

}  // namespace gradients

template <class T>
void launch_gradients(const Call<float>& call, cudaStream_t stream) {
  if (!has_lifts<T> && call.dqk <= panel && call.dhv <= panel) {
    launch_narrow_gradients(call, stream);
  } else if (wide_gradients(call.dqk, call.dhv)) {
    launch_values<T>(call, stream);
    launch_keys<T>(call, stream);
  } else if (call.dqk <= panel) {
    gradients::launch_for_dhv<T, 1>(call, stream);
  } else {
    gradients::launch_for_dhv<T, 2>(call, stream);
  }
}

}  // namespace tfla::cuda::sm90
