// States of bfloat16 heads.
#include "cuda/sm90/states/kernel.cuh"

namespace tfla::cuda::sm90 {

int state_columns(int dhv) { return dhv <= 128 ? 1 : (dhv + 255) / 256; }
int state_tiles(int dqk, int dhv) { return (dqk <= 64 ? 1 : (dqk + 127) / 128) * state_columns(dhv); }

int state_parts(int dqk, int dhv) {
  const bool small = dqk <= 64 && dhv <= 64;
  return state_tiles(dqk, dhv) * warpgroup_warps * states::state_warpgroups(small ? 64 : 256);
}

template void launch_segment_starts<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_segment_ends<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_states<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_grad_states<__nv_bfloat16>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
