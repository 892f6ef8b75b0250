// Stages `states` and `outputs` in one kernel on Hopper: the state never leaves the chip. Chunks are blocks of 64
// tokens; a block owns N columns of dhv of one head over a segment of a sequence, and is persistent.
//
//   warp 0       Q, K, V of the next blocks into rings
//   warp 1       their gate vectors
//   warps 2, 3   H from shared to global memory, one for each warpgroup of outputs
//   warps 4-11   outputs: two warpgroups take blocks in turn. S = Q K^T, gates, O = P V, O += Q C; H goes where Q was
//   warps 12-15  the state: rounds C for the outputs, then adds the block's keys and values
//
// With dqk above 128 and dhv above 64 the state takes warps 8-15, and warps 4-7 make all outputs; warp 3 loads K.
//
// For training the rounded states of chunk starts go to global memory too, from where the outputs read them. Backward
// needs them to more digits than H does, so keys go in as the sum of two bfloat16.
//
// In float16 the rounded C, n and P have a lift each (lift.cuh), and one term has the digits. No states are kept.
//
// Heads of dqk above 256 take two kernels (forward_halves.cu).
//
// P of the first 16 keys of a block, which all of its rows see, goes into its product as the sum of two bfloat16: the
// rounding of P would be half of the error of H. Both terms of all keys took 10 % longer.
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

template void launch_forward<__nv_bfloat16>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
