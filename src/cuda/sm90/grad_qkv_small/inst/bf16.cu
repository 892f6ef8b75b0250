// Stage `gradients` on Hopper for heads of dqk and dhv to 64: dQ, dK, dV of a chunk of 128 tokens and one head, one
// such tile after the other, two blocks to a multiprocessor. See docs/hopper.md.
//
// A tile of such heads is little work between many waits: for its tensors, for products of a few steps, for the other
// warps. So there are four warpgroups that multiply on a multiprocessor, not two, each with half the registers. Scores
// are made, gated and rounded 64 x 64 at a time, and a sum begins when those that it takes are rounded. One tile's
// tensors are in shared memory; the next ones come as each place becomes free, while the other block works.
//
// Of heads to 32 columns only these are multiplied: half the depth of the scores, and half the columns of the sums.
#include "cuda/sm90/grad_qkv_small/kernel.cuh"

namespace tfla::cuda::sm90 {

void launch_grad_qkv_small(const Call<float>& call, cudaStream_t stream) {
  using T = __nv_bfloat16;
  std::max(call.dims.dqk, call.dims.dhv) > 32 ? narrow::launch<T, 64>(call, stream)
                                              : narrow::launch<T, 32>(call, stream);
}

}  // namespace tfla::cuda::sm90
