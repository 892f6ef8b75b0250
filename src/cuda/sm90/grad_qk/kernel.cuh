// Stage `keys` on Hopper: the kernel and its launch. See keys.cu.
#pragma once

#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/grad_qk/load.cuh"
#include "cuda/sm90/grad_qk/math.cuh"
#include "cuda/sm90/grad_qk/row_dots.cuh"

namespace tfla::cuda::sm90 {

namespace keys {

enum class Pass : std::uint8_t { plain, norms, rows };  // norms: with gradients of n; rows: see rows.cuh
enum class Producer : std::uint8_t { panels, resident, results, gates };  // of a warp

template <class T, int W, bool Packed, Pass Which>
using ConsumerOf =
    std::conditional_t<Which == Pass::rows, RowConsumer<T, W, Packed>, Consumer<T, W, Packed, Which == Pass::norms>>;

template <class T, bool Packed, Pass Which>
__global__ void __launch_bounds__(threads, 1)
    keys_kernel(const __grid_constant__ MapsOf<Packed> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  constexpr bool norms = Which == Pass::norms, rows = Which == Pass::rows;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  const Barriers barriers{memory + Plan::barriers};
  if (!begin<Packed>(work.chunks, work.parts, [&] { barriers.init<rows>(); })) return;
  switch (role()) {
    case Role::producers: {
      arch::fewer_registers<producer_registers<norms>>();
      const bool first_lane = threadIdx.x % 32 == 0;
      switch (static_cast<Producer>(threadIdx.x / 32)) {
        case Producer::panels:
          if (first_lane) load_panels<Packed, rows>(maps, work, memory);
          break;
        case Producer::resident:
          if (first_lane) load_resident<Packed>(maps, work, memory);
          break;
        case Producer::results:
          if (!rows && first_lane) store_results<Packed>(maps, work, memory);
          break;
        case Producer::gates:
          load_gates<Plan::Gates, Packed, false, norms>(
              work.chunks, work.parts, memory, barriers.gates_full(), barriers.gates_empty(),
              [&](unsigned tile) { return static_cast<int>(work.parts.part_of(tile)) * work.vectors; },
              [&](unsigned tile) { return norm_product(work, tile); });
          break;
      }
      break;
    }
    case Role::consumer_0:
      arch::more_registers<consumer_registers>();
      ConsumerOf<T, 0, Packed, Which>(work, memory).run();
      break;
    case Role::consumer_1:
      arch::more_registers<second_consumer_registers<norms>>();
      ConsumerOf<T, 1, Packed, Which>(work, memory).run();
      break;
  }
#endif
}

inline Maps maps_of(const Call<float>& call) {
  const auto tokens = [&](const Strided& rows, int width, int box) {
    return token_map(call, rows, call.dims.heads, width, box);
  };
  const auto states = [&](const void* data) {
    return matrix_map(data, call.dims.chunk_count * call.dims.heads, call.dims.dqk, call.dims.padded_dhv(), columns);
  };
  return {.q = tokens(call.tensors.q, call.dims.dqk, chunk),
          .k = tokens(call.tensors.k, call.dims.dqk, chunk),
          .v = tokens(call.tensors.v, call.dims.dhv, chunk),
          .dh = tokens(call.tensors.dh, call.dims.dhv, chunk),
          .dq = tokens(call.tensors.dq, call.dims.dqk, half),
          .dk = tokens(call.tensors.dk, call.dims.dqk, half),
          .C = states(call.stored.C),
          .dC = states(call.stored.dC)};
}

inline int parts_of(const Call<float>& call) { return (call.dims.dqk + columns - 1) / columns; }
inline std::int64_t blocks_of(const Call<float>& call) {
  return std::min<std::int64_t>(call.dims.chunk_count * call.dims.heads * parts_of(call), multiprocessors());
}

inline Work work_of(const Call<float>& call) {
  static_assert(columns == Config<__nv_bfloat16>::width, "row sums come in parts of as many columns");
  return {.chunks = Chunks(call),
          .row_sums = call.sums.rows,
          .column_sums = call.sums.columns,
          .outflow = call.sums.outflow,
          .dhv_panels = (call.dims.dhv + panel - 1) / panel,
          .parts = Parts(call, parts_of(call), blocks_of(call)),
          .dqk = call.dims.dqk,
          .vectors = static_cast<int>(call.dims.all_tokens() * call.dims.heads),
          .state_tiles = static_cast<int>(hopper::state_tiles(call.dims.dqk, call.dims.dhv)),
          .state_columns = static_cast<int>(hopper::state_columns(call.dims.dhv)),
          .traces = call.sums.traces,
          .decays = call.gates.gbar,
          .n = static_cast<const float*>(call.stored.n),
          .dn = call.stored.dn};
}

template <class T, Pass Which>
void launch(const Call<float>& call, cudaStream_t stream) {
  constexpr const char* name = Which == Pass::rows ? "rows" : "keys";
  const Work work = work_of(call);
  const std::int64_t blocks = blocks_of(call);
  const Maps maps = maps_of(call);
  if (call.packing.cu_seqlens != nullptr)
    return launch_chained(name, keys_kernel<T, true, Which>, blocks, threads, shared_bytes, stream,
                          PackedMaps{maps, nothing_map(call, chunk)}, work);
  launch_chained(name, keys_kernel<T, false, Which>, blocks, threads, shared_bytes, stream, maps, work);
}

}  // namespace keys

}  // namespace tfla::cuda::sm90
