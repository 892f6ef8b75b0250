// Stages `states` and `outputs` in one kernel on Hopper: the kernel and its launch. See forward.cu.
#pragma once

#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/forward/movers.cuh"
#include "cuda/sm90/forward/outputs.cuh"
#include "cuda/sm90/forward/state.cuh"

namespace tfla::cuda::sm90 {

namespace forward {

template <class T, int M, int N, bool Normalized, bool Keep, bool Packed, Time Direction, Half Dqk>
__global__ void __launch_bounds__(threads, 1)
    forward_kernel(const __grid_constant__ typename Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk>::Maps maps,
                   const __grid_constant__ Call<float> call,
                   const __grid_constant__
                   typename Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk>::Shape shape) {
  using Block = forward::Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk>;
  using Space = typename Block::Space;
  using Registers = forward::Registers<T, M, N, Normalized, Keep, Packed, Direction, Dqk>;
  extern __shared__ unsigned char memory[];
  const unsigned space = (arch::shared_address(memory) + 1023U) & ~1023U;
  if (threadIdx.x == 0) {
    const auto make = [&](int offset, int count, unsigned arrivals) {
      for (int s = 0; s < count; ++s) arch::barrier_init(space + offset + 8 * s, arrivals);
    };
    make(Space::q_full, Space::slots * Space::parts, 1);
    for (int s = 0; s < Space::slots; ++s)  // H leaves through the first part; the warps of outputs free the other one
      for (int p = 0; p < Space::parts; ++p)
        make(Space::q_empty + 8 * (s * Space::parts + p), 1, (p == 0 ? 1 : 4) * arch::warp_arrivals);
    make(Space::k_full, Space::k_slots, 1);
    make(Space::k_empty, Space::k_slots, 8 * arch::warp_arrivals);  // four warps of outputs, four of a state
    make(Space::v_full, Space::slots, 1 + 32);
    make(Space::v_empty, Space::slots, (4 + 4 * Space::carriers) * arch::warp_arrivals);
    make(Space::c_full, Space::outputs, 4 * Space::carriers * arch::warp_arrivals);
    make(Space::c_empty, 1, (Keep && !Space::wide ? 5 : 4) * arch::warp_arrivals);
    arch::barriers_ready();
  }
  if (Space::n_rows && Normalized) {  // rows, or columns, that n does not take stay zero
    constexpr int first = Block::beside ? Space::n - Space::group_bytes : Space::n;
    for (int at = 4 * threadIdx.x; at < Space::gates - first; at += 4 * threads)
      arch::write_float(space + first + at, 0);
    arch::writes_before_copies();
  }
  __syncthreads();
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Block block{call, maps, shape, space};
  const int warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / 4;
  if (warpgroup == 0) {
    arch::fewer_registers<Registers::movers>();
    const Movers<T, M, N, Normalized, Keep, Packed, Direction, Dqk> movers{block};
    if (Space::wide) {
      if (threadIdx.x == 0) movers.template load_tokens<false, true>();
      if (threadIdx.x == 96) movers.template load_tokens<true, false>();
    } else {
      if (threadIdx.x == 0) movers.template load_tokens<true, true>();
    }
    if (warp == 1) movers.load_gates();
    if (warp >= 2 && warp < 2 + Space::outputs) movers.store_outputs(warp - 2);
  } else if (warpgroup <= Space::outputs) {
    arch::more_registers<Registers::outputs>();
    // One copy of the code for both: with two, warps wait for instructions. Broadcast, descriptors are uniform.
    const int own = Space::outputs == 1 ? 0 : __shfl_sync(0xFFFFFFFFU, warpgroup, 0) - 1;
    Outputs<T, M, N, Normalized, Keep, Packed, Direction, Dqk>{block}.make(own);
  } else if (Space::wide && warpgroup == 2) {
    arch::more_registers<Registers::state>();
    Carrier<T, M, N, Normalized, Keep, Packed, Direction, Dqk>{block}.template carry<0>();
  } else {
    arch::more_registers<Registers::state>();
    Carrier<T, M, N, Normalized, Keep, Packed, Direction, Dqk>{block}.template carry<Space::carriers - 1>();
  }
}

template <class T, int M, int N, bool Normalized, bool Keep, bool Packed, Time Direction, Half Dqk = Half::both>
void launch_packing(const Call<float>& call, cudaStream_t stream) {
  using Block = forward::Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk>;
  Shape shape{};
  shape.column_tiles = (call.dims.dhv + N - 1) / N;
  shape.items = static_cast<int>(call.dims.sequences) * call.dims.heads * call.dims.segments * shape.column_tiles;
  shape.blocks = std::min(shape.items, multiprocessors());
  shape.scale = static_cast<float>(call.rules.scale);
  shape.eps = static_cast<float>(call.rules.eps);
  typename Block::Maps maps{};
  if (Keep) {
    while (block_tokens << shape.kept_shift < call.dims.kept_chunk) ++shape.kept_shift;
    shape.kept_chunks = static_cast<int>((call.dims.tokens + call.dims.kept_chunk - 1) / call.dims.kept_chunk);
    maps.states = matrix_map(call.stored.C, call.dims.kept_count() * call.dims.heads, call.dims.dqk,
                             call.dims.padded_dhv(), Block::Space::wide ? 16 : 64 * M);
  }
  maps.q = token_map(call, call.tensors.q, call.dims.qk_heads, call.dims.dqk, block_tokens);
  maps.k = token_map(call, call.tensors.k, call.dims.qk_heads, call.dims.dqk, block_tokens);
  maps.v = token_map(call, call.tensors.v, call.dims.heads, call.dims.dhv, block_tokens);
  maps.h = token_map(call, call.tensors.h, call.dims.heads, call.dims.dhv, block_tokens);
  constexpr int bytes = has_lifts<T> ? Block::Space::lifted_bytes : Block::Space::bytes;
  static_assert(bytes <= cta_shared_bytes, "what a CTA may have");
  const auto start = [&](const typename Block::Shape& units, int blocks) {
    launch_chained(Block::reverse ? "reverse" : "forward",
                   forward_kernel<T, M, N, Normalized, Keep, Packed, Direction, Dqk>, blocks, threads, bytes, stream,
                   maps, call, units);
  };
  if constexpr (Packed) {
    maps.nothing = nothing_map(call, block_tokens);
    const Units units(call, call.dims.heads * shape.column_tiles);
    start({shape, units, Divider(shape.column_tiles), Divider(call.dims.heads)}, units.blocks);
  } else {
    start(shape, shape.blocks);
  }
}

template <class T, int M, int N, bool Normalized, bool Keep>
void launch_kernel(const Call<float>& call, cudaStream_t stream) {
  if (call.packing.cu_seqlens == nullptr)
    return launch_packing<T, M, N, Normalized, Keep, false, Time::forward>(call, stream);
  // Wide states of packed sequences are not kept: see keeps_hopper_states.
  launch_packing<T, M, N, Normalized, Keep && M <= 2, true, Time::forward>(call, stream);
}

template <class T, int M, int N>
void launch(const Call<float>& call, cudaStream_t stream) {
  if constexpr (!has_lifts<T>) {  // of float16 no states are kept: keeps_hopper_states
    if (call.dims.kept_chunk > 0)
      return call.rules.normalized ? launch_kernel<T, M, N, true, true>(call, stream)
                                   : launch_kernel<T, M, N, false, true>(call, stream);
  }
  call.rules.normalized ? launch_kernel<T, M, N, true, false>(call, stream)
                        : launch_kernel<T, M, N, false, false>(call, stream);
}

}  // namespace forward

template <class T>
void launch_forward(const Call<float>& call, cudaStream_t stream) {
  using forward::launch;
  if constexpr (!has_lifts<T>) {
    if (call.dims.dqk > kernel_dqk) return launch_forward_dqk512(call, stream);
  }
  launch_segment_starts<T>(call, stream);
  if (call.dims.dqk > 128 && call.dims.dhv > 64) return launch<T, 4, 128>(call, stream);
  if constexpr (!has_lifts<T>) {  // there is no room for lifts: see takes_dqk
    if (call.dims.dqk > 128) return launch<T, 4, 64>(call, stream);
  }
  if (call.dims.dqk > 64) return call.dims.dhv > 64 ? launch<T, 2, 128>(call, stream) : launch<T, 2, 64>(call, stream);
  return call.dims.dhv > 64 ? launch<T, 1, 128>(call, stream) : launch<T, 1, 64>(call, stream);
}

}  // namespace tfla::cuda::sm90
