// States on Hopper: C at the starts of chunks, or in reverse time dC at their ends (see portable/states.cu). A CTA owns
// up to 128 x 256 of a state. Two warpgroups hold half of the columns each in registers over a whole segment of a
// sequence, while a third loads and stores. Heads of dqk and dhv to 64 take one warpgroup for the state, and several
// CTAs share a multiprocessor.
//
//   warp 0      loads X (keys or queries) and Y (values or dH), a token block at a time, into a ring
//   warp 1      loads the weights of these tokens and the decay of their chunk
//   warp 2      stores rounded states from shared to global memory; in reverse time also loads the C of each chunk
//   warps 4-11  the state
//
//   loads   X, Y ring, gate vectors
//               |
//   state   C = decay C + (weight X)^T Y, n likewise;  C rounded into a buffer at the start of every chunk
//                                                         |
//   store                                                 '-> C to global memory
//
// In reverse time <C, dC> is taken with the C of two chunks. They lie in two buffers. When the product has read C, dC
// is rounded into the same buffer, on its way to global memory.
//
// In float16 what is rounded has a scale16 (scale16.cuh): the weights of a token block, and with them the state in
// registers; and the rounded state, whose inverse scale goes to global memory too.
#pragma once

#include <algorithm>

#include "cuda/arch/copy.cuh"
#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/common/table_rows.h"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/states/load.cuh"
#include "cuda/sm90/states/state.cuh"
#include "cuda/sm90/states/store.cuh"

namespace tfla::cuda::sm90 {

namespace states {

template <class C>
__global__ void __launch_bounds__(C::threads, C::ctas)
    states_kernel(const __grid_constant__ typename Cta<C>::Maps maps, const __grid_constant__ Call<float> call,
                  const __grid_constant__ typename Cta<C>::Work work) {
  TFLA_DYNAMIC_SHARED(1, memory);
  const Cta<C> cta{call, maps, work, {(arch::shared_address(memory) + 1023U) & ~1023U}};
  begin_kernel([&] { cta.shared.init_barriers(); });
  const int warpgroup = static_cast<int>(threadIdx.x) / warpgroup_threads;
  if (warpgroup == 0) {
    arch::fewer_registers<C::move_registers>();
    const Load<C> load{cta};
    if (threadIdx.x == 0) load.tokens();
    if (threadIdx.x / warp_threads == 1) load.gates();
    if (threadIdx.x == 2 * warp_threads && C::makes_states) Store<C>{cta}.states();
  } else {
    arch::more_registers<C::state_registers>();
    State<C>{cta, warpgroup - 1}.carry();
  }
}

template <class C>
void launch_kernel(const Call<float>& call, cudaStream_t stream) {
  const auto tiles = [](int size, int step) { return (size + step - 1) / step; };
  Work work{};
  work.row_tiles = tiles(call.dims.dqk, C::rows);
  work.column_tiles = tiles(call.dims.dhv, C::columns);
  work.items =
      static_cast<int>(call.dims.sequences) * call.dims.heads * call.dims.segments * work.row_tiles * work.column_tiles;
  if (!C::makes_states) work.items *= call.dims.pieces;
  Maps maps{};
  maps.x = qk_map(call, C::reverse ? call.tensors.q : call.tensors.k, token_block);
  maps.y = hv_map(call, C::reverse ? call.tensors.dh : call.tensors.v, token_block);
  if (C::makes_states) maps.stored = state_map(call, C::reverse ? call.stored.dC : call.stored.C, C::rows);
  if (C::makes_states && C::reverse) maps.c = state_map(call, call.stored.C, C::rows);
  const auto start = [&](const typename Cta<C>::Work& all, int ctas) {
    launch_chained("states", states_kernel<C>, ctas, C::threads, Shared<C>::bytes, stream,
                   add_nothing<C::packed>(maps, call, token_block), call, all);
  };
  if constexpr (C::packed) {
    const Units units(call, call.dims.heads * work.row_tiles * work.column_tiles, C::ctas);
    start({work, units, Divider(work.row_tiles), Divider(work.column_tiles), Divider(call.dims.heads)}, units.ctas);
  } else {
    start(work, std::min(work.items, multiprocessors() * C::ctas));
  }
}

template <Kernel K, class T, Time Direction, Pass P>
void launch(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  with_row<K, T>(tile, [&](auto row) {
    using Row = decltype(row);
    launch_by_packing(call, [&](auto packed) {
      constexpr bool is_packed = decltype(packed)::value;
      constexpr Options options{Row::rows / panel, Row::columns, Direction, P, is_packed};
      if constexpr ((Row::batches & (is_packed ? tfla::packed : tfla::dense)) != 0)
        launch_kernel<Config<T, options>>(call, stream);
      else
        refuse_launch();
    });
  });
}

}  // namespace states

template <class T>
void launch_segment_totals(const Call<float>& call, TileSize tile, Time direction, bool one_term, cudaStream_t stream) {
  using states::Pass;
  if (direction == Time::reverse)
    return states::launch<Kernel::grad_segment_totals, T, Time::reverse, Pass::totals>(call, tile, stream);
  // float16 has one term of keys in both passes.
  if constexpr (!needs_scale16<T>) {
    if (one_term)
      return states::launch<Kernel::segment_totals, T, Time::forward, Pass::rough_totals>(call, tile, stream);
  }
  states::launch<Kernel::segment_totals, T, Time::forward, Pass::totals>(call, tile, stream);
}

template <class T>
void launch_states(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  states::launch<Kernel::states, T, Time::forward, states::Pass::states>(call, tile, stream);
}

template <class T>
void launch_grad_states(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  states::launch<Kernel::grad_states, T, Time::reverse, states::Pass::states>(call, tile, stream);
}

}  // namespace tfla::cuda::sm90
