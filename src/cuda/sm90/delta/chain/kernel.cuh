// Hopper's kernels along the chain of states of the delta rule, from what solve made, with the states in registers. A
// CTA has up to 128 columns of a head of one sequence and goes from tile to tile.
//
//   loads    Q, K, V or dH, and the solved tile, three tiles in flight
//   scores   P, two tiles in flight
//   chains   the states, in 64 columns each (forward.cuh, reverse.cuh)
#pragma once

#include "cuda/arch/copy.cuh"
#include "cuda/arch/dynamic_shared.h"
#include "cuda/device.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/delta/chain/forward.cuh"
#include "cuda/sm90/delta/chain/load.cuh"
#include "cuda/sm90/delta/chain/reverse.cuh"
#include "cuda/sm90/delta/chain/scores.cuh"

namespace tfla::cuda::sm90::delta_rule {

template <class C, int W>
__device__ __forceinline__ void go_along(const ChainItem<C>& item) {
  arch::more_registers<C::chain_registers>();
  if constexpr (C::reverse)
    ReverseChain<C, W>(item).run();
  else
    ForwardChain<C, W>(item).run();
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    chain_kernel(const __grid_constant__ MapsFor<ChainMaps, C::packed> maps, const __grid_constant__ DeltaCall call,
                 const __grid_constant__ ChainWork work) {
  TFLA_DYNAMIC_SHARED(1024, memory);
  const ChainShared<C> shared{arch::shared_address(memory)};
  begin_kernel([&] { shared.init(); });
  const ChainItem<C> item(call, maps, work, shared.memory);
  switch (static_cast<std::uint8_t>(threadIdx.x / warpgroup_threads)) {
    case 0:
      arch::fewer_registers<C::load_registers>();
      if (threadIdx.x == 0) load_tiles_of(item);
      break;
    case 1:
      arch::fewer_registers<C::score_registers>();
      if constexpr (C::makes_scores) make_scores(item);
      break;
    case 2: go_along<C, 0>(item); break;
    default:
      if constexpr (C::chains == 2) go_along<C, 1>(item);
      break;
  }
}

template <ChainOptions O>
void launch_chain(const char* name, const DeltaCall& call, cudaStream_t stream) {
  using C = ChainConfig<O>;
  const auto& dims = call.dims;
  const TokenAxes axes{dims.batch, dims.tokens, C::packed};
  const auto map = [&](const Strided& tensor, int heads, int columns) {
    return token_map(axes, tensor, heads, columns, tile_tokens);
  };
  MapsFor<ChainMaps, C::packed> maps{};
  if constexpr (C::reads_queries) maps.q = map(call.tensors.q, dims.qk_heads, dims.dqk);
  maps.k = map(call.tensors.k, dims.qk_heads, dims.dqk);
  maps.v = map(C::reverse ? call.tensors.dh : call.tensors.v, dims.heads, dims.dhv);
  if constexpr (C::pass != Pass::states)
    maps.h = map(C::reverse ? call.tensors.dv : call.tensors.h, dims.heads, dims.dhv);
  maps.solved = matrix_map(call.scratch.solved, dims.tiles * dims.heads, solved_rows, tile_tokens, solved_rows);
  if constexpr (C::packed) maps.nothing = nothing_map(call.tensors.q.data, tile_tokens);
  const ChainWork work{(dims.dhv + C::columns - 1) / C::columns};
  launch_chained(name, chain_kernel<C>, dims.sequences * dims.heads * work.column_tiles, C::threads,
                 static_cast<int>(ChainShared<C>::bytes), stream, maps, call, work);
}

template <Pass P, int KeyPanels, int Chains>
void launch_packing(const char* name, const DeltaCall& call, cudaStream_t stream) {
  if (call.cu_seqlens != nullptr) return launch_chain<ChainOptions{P, KeyPanels, Chains, true}>(name, call, stream);
  launch_chain<ChainOptions{P, KeyPanels, Chains, false}>(name, call, stream);
}

template <Pass P, int KeyPanels>
void launch_columns(const char* name, const DeltaCall& call, cudaStream_t stream) {
  if (call.dims.panel == panel) return launch_packing<P, KeyPanels, 1>(name, call, stream);
  launch_packing<P, KeyPanels, 2>(name, call, stream);
}

template <Pass P>
void launch_pass(const char* name, const DeltaCall& call, cudaStream_t stream) {
  if (call.dims.dqk <= panel) return launch_columns<P, 1>(name, call, stream);
  launch_columns<P, 2>(name, call, stream);
}

}  // namespace tfla::cuda::sm90::delta_rule
