// Stage `states` and its reverse-time twin on Hopper: the kernel and its launch. See states.cu.
#pragma once

#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/states/movers.cuh"
#include "cuda/sm90/states/state.cuh"

namespace tfla::cuda::sm90 {

namespace states {

template <class T, Time Direction, Pass Which, int M, int Columns, bool Packed>
__global__ void __launch_bounds__(Residents<Direction, M, Columns>::threads, Residents<Direction, M, Columns>::blocks)
    states_kernel(const __grid_constant__ typename Block<T, Direction, Which, M, Columns, Packed>::Maps maps,
                  const __grid_constant__ Call<float> call,
                  const __grid_constant__ typename Block<T, Direction, Which, M, Columns, Packed>::Shape shape) {
  using Space = states::Space<Direction, M, Columns>;
  using Residents = states::Residents<Direction, M, Columns>;
  constexpr int warpgroups = Space::warpgroups;
  extern __shared__ unsigned char memory[];
  const unsigned space = (arch::shared_address(memory) + 1023U) & ~1023U;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Space::slots; ++s) {
      arch::barrier_init(space + Space::full + 8 * s, 1 + 32);
      arch::barrier_init(space + Space::empty + 8 * s, 4 * warpgroups * arch::warp_arrivals);
    }
    arch::barrier_init(space + Space::drained, 1);
    for (int b = 0; b < Space::buffers; ++b) {
      arch::barrier_init(space + Space::staged + 8 * b, 4 * warpgroups * arch::warp_arrivals);
      arch::barrier_init(space + Space::loaded + 8 * b, 1);
    }
    arch::barriers_ready();
  }
  __syncthreads();
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Block<T, Direction, Which, M, Columns, Packed> block{call, maps, shape, space};
  const int warpgroup = static_cast<int>(threadIdx.x) / warpgroup_threads;
  if (warpgroup == 0) {
    arch::fewer_registers<Residents::movers>();
    const Movers<T, Direction, Which, M, Columns, Packed> movers{block};
    if (threadIdx.x == 0) movers.load_tokens();
    if (threadIdx.x / 32 == 1) movers.load_gates();
    if (threadIdx.x == 64 && Which == Pass::proper) movers.move_states();
  } else {
    arch::more_registers<Residents::state>();
    Carrier<T, Direction, Which, M, Columns, Packed>{block}.carry(warpgroup - 1);
  }
}

template <class T, Time Direction, Pass Which, int M, int Columns, bool Packed>
void launch_pass(const Call<float>& call, cudaStream_t stream) {
  using Block = states::Block<T, Direction, Which, M, Columns, Packed>;
  using Residents = states::Residents<Direction, M, Columns>;
  constexpr bool reverse = Direction == Time::reverse;
  const auto tiles = [](int size, int step) { return (size + step - 1) / step; };
  Shape shape{};
  shape.row_tiles = tiles(call.dims.dqk, 64 * M);
  shape.column_tiles = tiles(call.dims.dhv, Columns);
  shape.items = static_cast<int>(call.dims.sequences) * call.dims.heads * call.dims.segments * shape.row_tiles *
                shape.column_tiles;
  if (Which != Pass::proper) shape.items *= call.dims.pieces;
  typename Block::Maps maps{};
  maps.x = token_map(call, reverse ? call.tensors.q : call.tensors.k, call.dims.qk_heads, call.dims.dqk, block_tokens);
  maps.y = token_map(call, reverse ? call.tensors.dh : call.tensors.v, call.dims.heads, call.dims.dhv, block_tokens);
  const auto map_of = [&](const void* states) {
    return matrix_map(states, call.dims.chunk_count * call.dims.heads, call.dims.dqk, call.dims.padded_dhv(), 64 * M);
  };
  if (Which == Pass::proper) maps.stored = map_of(reverse ? call.stored.dC : call.stored.C);
  if (Which == Pass::proper && reverse) maps.c = map_of(call.stored.C);
  const auto start = [&](const typename Block::Shape& units, int blocks) {
    launch_chained("states", states_kernel<T, Direction, Which, M, Columns, Packed>, blocks, Residents::threads,
                   Space<Direction, M, Columns>::bytes, stream, maps, call, units);
  };
  if constexpr (Packed) {
    maps.nothing = nothing_map(call, block_tokens);
    const Units units(call, call.dims.heads * shape.row_tiles * shape.column_tiles, Residents::blocks);
    start({shape, units, Divider(shape.row_tiles), Divider(shape.column_tiles), Divider(call.dims.heads)},
          units.blocks);
  } else {
    start(shape, std::min(shape.items, multiprocessors() * Residents::blocks));
  }
}

// Which: totals alone, with the states they add up to, or what comes after.
template <class T, Time Direction, Pass Which, int M, int Columns>
void launch_step(const Call<float>& call, cudaStream_t stream) {
  if (call.packing.cu_seqlens != nullptr) {
    launch_pass<T, Direction, Which, M, Columns, true>(call, stream);
    if (Which != Pass::proper) launch_packed_segment_scan(call, Direction == Time::reverse, stream);
    return;
  }
  launch_pass<T, Direction, Which, M, Columns, false>(call, stream);
  if (Which != Pass::proper) launch_segment_scan<T>(call, Direction, stream);
}

template <class T, Time Direction, Pass Which>
void launch(const Call<float>& call, cudaStream_t stream) {
  if (call.dims.dqk <= 64 && call.dims.dhv <= 64) return launch_step<T, Direction, Which, 1, 64>(call, stream);
  if (call.dims.dqk <= 64 && call.dims.dhv <= 128) return launch_step<T, Direction, Which, 1, 128>(call, stream);
  if (call.dims.dqk <= 64) return launch_step<T, Direction, Which, 1, 256>(call, stream);
  if (call.dims.dhv <= 128) return launch_step<T, Direction, Which, 2, 128>(call, stream);
  launch_step<T, Direction, Which, 2, 256>(call, stream);
}

}  // namespace states

template <class T>
void launch_segment_starts(const Call<float>& call, cudaStream_t stream) {
  using states::Pass;
  if (call.dims.segments == 1) return;
  // float16 keeps no states, and has one term of keys in either pass.
  if (needs_scale16<T> || call.dims.kept_chunk > 0) return states::launch<T, Time::forward, Pass::totals>(call, stream);
  if constexpr (!needs_scale16<T>) states::launch<T, Time::forward, Pass::rough_totals>(call, stream);
}

template <class T>
void launch_segment_ends(const Call<float>& call, cudaStream_t stream) {
  using states::Pass;
  if (call.dims.segments > 1) states::launch<T, Time::reverse, Pass::totals>(call, stream);
}

template <class T>
void launch_states(const Call<float>& call, cudaStream_t stream) {
  using states::Pass;
  if (call.dims.segments > 1) states::launch<T, Time::forward, Pass::totals>(call, stream);
  states::launch<T, Time::forward, Pass::proper>(call, stream);
}

template <class T>
void launch_grad_states(const Call<float>& call, cudaStream_t stream) {
  using states::Pass;
  launch_segment_ends<T>(call, stream);
  states::launch<T, Time::reverse, Pass::proper>(call, stream);
}

}  // namespace tfla::cuda::sm90
