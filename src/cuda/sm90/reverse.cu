// Stages `dstates` and `values` in one kernel on Hopper: the reverse-time twin of forward.cu.
//
//   dV = abar K dC + P^T dH                 H = qbar Q C + P V, times scale / den
//   dC <- gbar dC + (qbar Q)^T dH           C <- gbar C + (abar K)^T V
//
// with P of a block and its state as there. It is the same kernel with Q and K, V and dH, H and dV in each other's
// place, blocks of 64 tokens in the other order, and queries before their keys masked. scale / den belongs to the
// queries, which are columns here, so it is in their gate vectors (gates.cu). P is rounded once, as `values` does.
//
// For heads too wide for stage `gradients`, and for others where it fills the GPU better (plan.cc).
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

namespace {

using T = __nv_bfloat16;
static_assert(reverse_block == block_tokens, "their gate vectors");

template <int M, int N>
void launch(const Call<float>& call, cudaStream_t stream) {
  using forward::launch_packing;
  call.cu_seqlens == nullptr ? launch_packing<T, M, N, false, true, false, Time::reverse>(call, stream)
                             : launch_packing<T, M, N, false, true, true, Time::reverse>(call, stream);
}

// Forward's names for what it reads and writes.
Call<float> twin_of(const Call<float>& call) {
  Call<float> twin = call;
  twin.L = block_tokens;
  twin.kept_chunk = call.L;
  const int blocks = call.L / block_tokens;  // of a chunk
  if (call.chunks_per_row > 0) twin.chunks_per_row = static_cast<int>((call.tokens + block_tokens - 1) / block_tokens);
  twin.chunks_per_segment *= blocks;
  twin.chunks_per_piece *= blocks;
  twin.q = call.k;
  twin.k = call.q;
  twin.v = call.dh;
  twin.h = call.dv;
  twin.C0 = call.dC_last;
  twin.C_last = call.dC0;
  twin.n_last = call.dn0;
  twin.states = call.dstates;
  twin.u = call.log_c;
  twin.log_c = call.block_u;
  twin.qbar = call.block_abar;
  twin.abar = call.block_qbar;
  twin.gbar = call.block_gbar;
  return twin;
}

}  // namespace

bool has_reverse(std::int64_t dqk, std::int64_t dhv) { return dqk <= kernel_dqk && (dqk > 128 || dhv > 64); }

void launch_reverse(const Call<float>& call, cudaStream_t stream) {
  launch_segment_ends<T>(call, stream);
  const Call<float> twin = twin_of(call);
  if (call.dqk > 128) return call.dhv > 64 ? launch<4, 128>(twin, stream) : launch<4, 64>(twin, stream);
  call.dqk > 64 ? launch<2, 128>(twin, stream) : launch<1, 128>(twin, stream);
}

}  // namespace tfla::cuda::sm90
