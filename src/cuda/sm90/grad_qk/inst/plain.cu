// Stage `keys` on Hopper: dQ and dK of heads that are too wide for the kernel `gradients`. See docs/hopper.md.
//
// A tile is a chunk of 128 tokens of one head and 128 columns of dqk. V, dH, C and dC stream through a ring in panels
// of 64 columns of dhv, for dP = V dH^T, dK = V dC^T and dQ = dH C^T side by side; Q and K come in for the end of the
// tile, where dP becomes dS. Two consumer warpgroups own 64 keys and 64 queries each, as in `gradients`.
#include "cuda/sm90/grad_qk/kernel.cuh"

namespace tfla::cuda::sm90 {

static_assert(hopper::trace_columns == keys::columns && hopper::warps == keys::trace_warps);

template <class T>
void launch_grad_qk(const Call<float>& call, cudaStream_t stream) {
  keys::launch<T, keys::Pass::plain>(call, stream);
}

template void launch_grad_qk<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_grad_qk<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
