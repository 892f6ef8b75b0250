// forward_on_chip: H of the delta rule from what solve made, with the states in registers. A CTA has up to 128 columns
// of a head of one sequence and goes from tile to tile.
//
//   loads    Q, K, V and the solved tile, three tiles in flight
//   scores   P, two tiles in flight
//   chains   residuals, H and C, in 64 columns each (chain.cuh)
#include "cuda/arch/copy.cuh"
#include "cuda/arch/dynamic_shared.h"
#include "cuda/device.h"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/delta/forward/chain.cuh"
#include "cuda/sm90/delta/forward/load.cuh"
#include "cuda/sm90/delta/forward/scores.cuh"

namespace tfla::cuda::sm90::delta_rule {

namespace {

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    forward_kernel(const __grid_constant__ MapsFor<ForwardMaps, C::packed> maps, const __grid_constant__ DeltaCall call,
                   const __grid_constant__ ForwardWork work) {
  TFLA_DYNAMIC_SHARED(1024, memory);
  const ForwardShared<C> shared{arch::shared_address(memory)};
  begin_kernel([&] { shared.init(); });
  const ForwardItem<C> item(call, maps, work, shared.memory);
  switch (static_cast<std::uint8_t>(threadIdx.x / warpgroup_threads)) {
    case 0:
      arch::fewer_registers<C::load_registers>();
      if (threadIdx.x == 0) load_tiles_of(item);
      break;
    case 1:
      arch::fewer_registers<C::score_registers>();
      make_scores(item);
      break;
    case 2:
      arch::more_registers<C::chain_registers>();
      Chain<C, 0>(item).run();
      break;
    default:
      if constexpr (C::chains == 2) {
        arch::more_registers<C::chain_registers>();
        Chain<C, 1>(item).run();
      }
      break;
  }
}

template <ForwardOptions O>
void launch_forward(const DeltaCall& call, cudaStream_t stream) {
  using C = ForwardConfig<O>;
  const auto& dims = call.dims;
  const TokenAxes axes{dims.batch, dims.tokens, C::packed};
  const auto map = [&](const Strided& tensor, int heads, int columns) {
    return token_map(axes, tensor, heads, columns, tile_tokens);
  };
  MapsFor<ForwardMaps, C::packed> maps{};
  maps.q = map(call.tensors.q, dims.qk_heads, dims.dqk);
  maps.k = map(call.tensors.k, dims.qk_heads, dims.dqk);
  maps.v = map(call.tensors.v, dims.heads, dims.dhv);
  maps.h = map(call.tensors.h, dims.heads, dims.dhv);
  maps.solved = matrix_map(call.scratch.solved, dims.tiles * dims.heads, solved_rows, tile_tokens, solved_rows);
  if constexpr (C::packed) maps.nothing = nothing_map(call.tensors.q.data, tile_tokens);
  const ForwardWork work{(dims.dhv + C::columns - 1) / C::columns};
  launch_chained("delta forward_on_chip", forward_kernel<C>, dims.sequences * dims.heads * work.column_tiles,
                 C::threads, static_cast<int>(ForwardShared<C>::bytes), stream, maps, call, work);
}

template <int KeyPanels, int Chains>
void launch_packing(const DeltaCall& call, cudaStream_t stream) {
  if (call.cu_seqlens != nullptr) return launch_forward<ForwardOptions{KeyPanels, Chains, true}>(call, stream);
  launch_forward<ForwardOptions{KeyPanels, Chains, false}>(call, stream);
}

template <int KeyPanels>
void launch_columns(const DeltaCall& call, int columns, cudaStream_t stream) {
  if (columns == panel) return launch_packing<KeyPanels, 1>(call, stream);
  launch_packing<KeyPanels, 2>(call, stream);
}

}  // namespace

}  // namespace tfla::cuda::sm90::delta_rule

namespace tfla::cuda::sm90 {

void launch_delta_forward(const delta::Call<float>& call, int columns, cudaStream_t stream) {
  if (call.dims.dqk <= panel) return delta_rule::launch_columns<1>(call, columns, stream);
  delta_rule::launch_columns<2>(call, columns, stream);
}

}  // namespace tfla::cuda::sm90
