// Stage `states` and its reverse-time twin (see portable/states.cu) on Hopper. A block owns up to 128 x 256 of a state:
// two warpgroups keep half of the columns each in registers over a whole segment of a sequence, while a third moves
// data. Of heads of dqk and dhv to 64 one warpgroup keeps the state, and several blocks share a multiprocessor.
//
//   warp 0      X (keys or queries) and Y (values or dH), 64 tokens at a time, into a ring
//   warp 1      weights of these tokens and the decay of their chunk
//   warp 2      rounded states from shared to global memory; in reverse time also the C of each chunk the other way
//   warps 4-11  the state
//
// In reverse time <C, dC> is taken with the C of two chunks. They lie in two buffers, and the one that has served twice
// is where dC is rounded to, on its way to global memory.
//
// In float16 what is rounded has a lift (lift.cuh): the weights of 64 tokens, and with them the state in registers; and
// the rounded state, whose lift goes to global memory too.
#include "cuda/sm90/states/kernel.cuh"

namespace tfla::cuda::sm90 {

static_assert(hopper::through_parts(64, 64) == 4 * states::Roles<1, 64>::warpgroups);
static_assert(hopper::through_parts(128, 256) == 4 * states::Roles<2, 256>::warpgroups);

template void launch_segment_totals<__nv_bfloat16>(const Call<float>&, Time, bool, cudaStream_t);
template void launch_states<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_grad_states<__nv_bfloat16>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
