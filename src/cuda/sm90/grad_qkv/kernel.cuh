// Stage `gradients` on Hopper: the kernel and its launch. See gradients.cu.
#pragma once

#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/grad_qkv/load.cuh"
#include "cuda/sm90/grad_qkv/math.cuh"

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
          load_gates<typename Plan<Size>::Gates, Packed, needs_scale16<T>>(work.chunks, work.tiles, memory,
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
  const auto tokens = [&](const Strided& rows, int columns, int box) {
    return token_map(call, rows, call.dims.heads, columns, box);
  };
  const auto states = [&](const void* data) {
    return matrix_map(data, call.dims.chunk_count * call.dims.heads, call.dims.dqk, call.dims.padded_dhv(),
                      dqk_panels * panel);
  };
  return {.q = tokens(call.tensors.q, call.dims.dqk, chunk),
          .k = tokens(call.tensors.k, call.dims.dqk, chunk),
          .v = tokens(call.tensors.v, call.dims.dhv, chunk),
          .dh = tokens(call.tensors.dh, call.dims.dhv, chunk),
          .dk = tokens(call.tensors.dk, call.dims.dqk, chunk),
          .dv = tokens(call.tensors.dv, call.dims.dhv, chunk),
          .dq = tokens(call.tensors.dq, call.dims.dqk, half),
          .C = states(call.stored.C),
          .dC = states(call.stored.dC)};
}

inline Work work_of(const Call<float>& call) {
  return {.chunks = Chunks(call),
          .row_sums = call.sums.rows,
          .column_sums = call.sums.columns,
          .outflow = call.sums.outflow,
          .tiles = {static_cast<unsigned>(call.dims.chunk_count * call.dims.heads)},
          .dhv = call.dims.dhv};
}

template <class T, class Size>
void launch(const Call<float>& call, cudaStream_t stream) {
  const Work work = work_of(call);
  const std::int64_t blocks = std::min<std::int64_t>(work.tiles.tiles, multiprocessors());
  const Maps maps = maps_of(call, Size::dqk);
  if (call.packing.cu_seqlens != nullptr)
    return launch_chained("gradients", gradients_kernel<T, Size, true>, blocks, threads, shared_bytes<Size>, stream,
                          PackedMaps{maps, nothing_map(call, chunk)}, work);
  launch_chained("gradients", gradients_kernel<T, Size, false>, blocks, threads, shared_bytes<Size>, stream, maps,
                 work);
}

template <class T, int Dqk>
void launch_for_dhv(const Call<float>& call, cudaStream_t stream) {
  switch ((call.dims.dhv + panel - 1) / panel) {
    case 1:
    case 2: launch<T, Panels<Dqk, 2>>(call, stream); break;
    case 3: launch<T, Panels<Dqk, 3>>(call, stream); break;
    default: launch<T, Panels<Dqk, 4>>(call, stream); break;
  }
}

}  // namespace gradients

template <class T>
void launch_grad_qkv(const Call<float>& call, cudaStream_t stream) {
  if (!needs_scale16<T> && call.dims.dqk <= panel && call.dims.dhv <= panel) {
    launch_grad_qkv_small(call, stream);
  } else if (splits_grad_qkv(call.dims.dqk, call.dims.dhv)) {
    launch_grad_v<T>(call, stream);
    launch_grad_qk<T>(call, stream);
  } else if (call.dims.dqk <= panel) {
    gradients::launch_for_dhv<T, 1>(call, stream);
  } else {
    gradients::launch_for_dhv<T, 2>(call, stream);
  }
}

}  // namespace tfla::cuda::sm90
