// Stage `values` on Hopper: dV = abar (K dC) + P^T dH with P = (Q K^T) . D, of heads too wide for stage `gradients`. A
// tile is a chunk of 128 tokens, a head and a part of up to 256 columns of dhv, one after the other on every
// multiprocessor. See docs/hopper.md.
//
// Everything streams through one ring: panels of 64 of dqk, by which scores and K dC are summed up, then dH, in whose
// place dV leaves. Two consumer warpgroups own 64 keys each. Scores are computed with keys in rows, so that P is a
// register operand.
#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/grad_v/load.cuh"
#include "cuda/sm90/grad_v/math.cuh"

namespace tfla::cuda::sm90 {

namespace values {

enum class Producer : std::uint8_t { ring, results, gates };  // of a warp

template <class T, int Panels, bool Packed>
__global__ void __launch_bounds__(threads, 1)
    values_kernel(const __grid_constant__ MapsOf<Packed> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  const Barriers barriers{memory + Plan::barriers};
  if (!begin<Packed>(work.chunks, work.parts, [&] { barriers.init(); })) return;
  switch (role()) {
    case Role::producers: {
      arch::fewer_registers<producer_registers>();
      const bool first_lane = threadIdx.x % 32 == 0;
      switch (static_cast<Producer>(threadIdx.x / 32)) {
        case Producer::ring:
          if (first_lane) load_ring<Panels, Packed>(maps, work, memory);
          break;
        case Producer::results:
          if (first_lane) store_results<Panels, Packed>(maps, work, memory);
          break;
        case Producer::gates:
          load_gates<Plan::Gates, Packed>(work.chunks, work.parts, memory, barriers.gates_full(),
                                          barriers.gates_empty(), [](unsigned) { return 0; });
          break;
      }
      break;
    }
    case Role::consumer_0:
      arch::more_registers<consumer_registers>();
      Consumer<T, Panels, 0, Packed>(work, memory).run();
      break;
    case Role::consumer_1:
      arch::more_registers<consumer_registers>();
      Consumer<T, Panels, 1, Packed>(work, memory).run();
      break;
  }
#endif
}

}  // namespace values

namespace {

using namespace values;

constexpr int widest = 4;  // panels of a part: dV of 64 keys and their scores fill the registers

int panels_of(int columns) { return (columns + panel - 1) / panel; }

Maps maps_of(const Call<float>& call) {
  const auto tokens = [&](const Strided& rows, int columns, int box) {
    return token_map(call, rows, call.dims.heads, columns, box);
  };
  return {.q = tokens(call.tensors.q, call.dims.dqk, chunk),
          .k = tokens(call.tensors.k, call.dims.dqk, chunk),
          .dh = tokens(call.tensors.dh, call.dims.dhv, half),
          .dv = tokens(call.tensors.dv, call.dims.dhv, half),
          .dC = matrix_map(call.stored.dC, call.dims.chunk_count * call.dims.heads, call.dims.dqk,
                           call.dims.padded_dhv(), half)};
}

template <class T, int Panels>
void launch(const Call<float>& call, int parts, cudaStream_t stream) {
  const std::int64_t blocks =
      std::min<std::int64_t>(call.dims.chunk_count * call.dims.heads * parts, multiprocessors());
  const Work work{.chunks = Chunks(call),
                  .depth = panels_of(call.dims.dqk),
                  .parts = Parts(call, parts, blocks),
                  .dhv = call.dims.dhv,
                  .state_tiles = state_tiles(call.dims.dqk, call.dims.dhv),
                  .state_columns = state_columns(call.dims.dhv)};
  const Maps maps = maps_of(call);
  if (call.packing.cu_seqlens != nullptr)
    return launch_chained("values", values_kernel<T, Panels, true>, blocks, threads, shared_bytes, stream,
                          PackedMaps{maps, nothing_map(call, half)}, work);
  launch_chained("values", values_kernel<T, Panels, false>, blocks, threads, shared_bytes, stream, maps, work);
}

}  // namespace

template <class T>
void launch_grad_v(const Call<float>& call, cudaStream_t stream) {
  const int panels = panels_of(call.dims.dhv);
  if constexpr (!needs_scale16<T>) {
    // Up to kernel_dqk more than one have `reverse` instead.
    panels == 1 ? launch<T, 1>(call, 1, stream) : launch<T, widest>(call, (panels + widest - 1) / widest, stream);
  } else {
    // As few parts as possible, as wide as each other: 320 columns are two parts of 192.
    const int parts = (panels + widest - 1) / widest;
    switch ((panels + parts - 1) / parts) {
      case 1: launch<T, 1>(call, parts, stream); break;
      case 2: launch<T, 2>(call, parts, stream); break;
      case 3: launch<T, 3>(call, parts, stream); break;
      default: launch<T, 4>(call, parts, stream); break;
    }
  }
}

template void launch_grad_v<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_grad_v<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
