// dC and dV in one kernel on Hopper: the reverse-time twin of forward.
//
//   dV = abar K dC + P^T dH                 H = qbar Q C + P V, times scale / den
//   dC <- gbar dC + (qbar Q)^T dH           C <- gbar C + (abar K)^T V
//
// It is the same kernel with Q and K, V and dH, H and dV exchanged, token blocks in reverse order, and queries before
// their keys masked. scale / den belongs to the queries, which are columns here, so it is in their gate vectors
// (gates.cu). P is rounded once, as in grad_v.
//
// grad_v_reverse is the same without a stored dC: grad_qk_reverse has its own.
#include "cuda/sm90/forward/kernel.cuh"

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

// Forward's names for what it reads and writes.
Call<float> twin_of(const Call<float>& call) {
  Call<float> twin = call;
  twin.dims.L = token_block;
  twin.dims.kept_chunk = call.dims.L;
  const int blocks = call.dims.L / token_block;  // token blocks of a chunk
  if (call.dims.chunks_per_row > 0)
    twin.dims.chunks_per_row = static_cast<int>((call.dims.tokens + token_block - 1) / token_block);
  twin.dims.chunks_per_segment *= blocks;
  twin.dims.chunks_per_piece *= blocks;
  twin.tensors.q = call.tensors.k;
  twin.tensors.k = call.tensors.q;
  twin.tensors.v = call.tensors.dh;
  twin.tensors.h = call.tensors.dv;
  twin.carried.C0 = call.carried.dC_last;
  twin.carried.C_last = call.carried.dC0;
  twin.carried.n_last = call.carried.dn0;
  twin.stored.C = call.stored.dC;
  twin.gates.u = call.gates.log_c;
  twin.gates.log_c = call.gates.block_u;
  twin.gates.qbar = call.gates.block_abar;
  twin.gates.abar = call.gates.block_qbar;
  twin.gates.gbar = call.gates.block_gbar;
  return twin;
}

}  // namespace

void launch_grad_states_v(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  const Call<float> twin = twin_of(call);
  with_row<Kernel::grad_states_v, T>(
      tile, [&](auto row) { launch<decltype(row)::rows / panel, decltype(row)::columns>(twin, stream); });
}

void launch_grad_v_reverse(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  const Call<float> twin = twin_of(call);
  with_row<Kernel::grad_v_reverse, T>(tile, [&](auto row) {
    launch<decltype(row)::rows / panel, decltype(row)::columns, Keep::nothing>(twin, stream);
  });
}

}  // namespace tfla::cuda::sm90
