// dC and dV in one kernel on Hopper: the reverse-time twin of forward.
//
//   dV = abar K dC + P^T dH                 H = qbar Q C + P V, times scale / den
//   dC <- gbar dC + (qbar Q)^T dH           C <- gbar C + (abar K)^T V
//
// It is the same kernel with Q and K, V and dH, H and dV exchanged, token blocks in reverse order, and queries before
// their keys masked. scale / den belongs to the queries, which are columns here, so it is in their gate vectors
// (gates.cu). P is rounded once, as in grad_v.
//
// grad_v_reverse is the same without a stored dC: grad_k_reverse has its own.
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/twin.h"

namespace tfla::cuda::sm90 {

namespace {

using T = __nv_bfloat16;

template <int DqkPanels, int Columns, Keep K = Keep::states>
void launch(const Call<float>& call, cudaStream_t stream) {
  constexpr forward::Options options{.dqk_panels = DqkPanels,
                                     .columns = Columns,
                                     .normalized = false,
                                     .keep = K,
                                     .packed = false,
                                     .direction = Time::reverse};
  forward::launch_by_packing<T, options>(call, stream);
}

}  // namespace

void launch_grad_states_v(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  const Call<float> twin = forward::twin_of_grad_v(call);
  with_row<Kernel::grad_states_v, T>(
      tile, [&](auto row) { launch<decltype(row)::rows / panel, decltype(row)::columns>(twin, stream); });
}

void launch_grad_v_reverse(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  const Call<float> twin = forward::twin_of_grad_v(call);
  with_row<Kernel::grad_v_reverse, T>(tile, [&](auto row) {
    launch<decltype(row)::rows / panel, decltype(row)::columns, Keep::nothing>(twin, stream);
  });
}

}  // namespace tfla::cuda::sm90
