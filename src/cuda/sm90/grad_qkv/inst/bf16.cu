// Stage `gradients` on Hopper: dQ, dK, dV of a chunk of 128 tokens and one head, one such tile after the other on every
// multiprocessor. Heads too wide for that are left to `values` and `keys`. See docs/hopper.md.
//
// V, C and dC stream through a ring in panels of 64 columns, only Q, K and dH stay for the whole tile. Two consumer
// warpgroups own 64 keys (for dK, dV) and 64 queries (for dQ) each. Scores are computed with keys in rows, so that P
// and dS are register operands for dV and dK; dS goes through shared memory once, for dQ.
//
// In float16 every row of P has a lift (lift.cuh), and dS of a tile has one.
#include "cuda/sm90/grad_qkv/kernel.cuh"

namespace tfla::cuda::sm90 {

template void launch_grad_qkv<__nv_bfloat16>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
