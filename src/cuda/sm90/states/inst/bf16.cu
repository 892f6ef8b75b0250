// States of bfloat16 heads.
#include "cuda/sm90/states/kernel.cuh"

namespace tfla::cuda::sm90 {

static_assert(hopper::through_parts(64, 64) == warpgroup_warps * states::state_warpgroups(64));
static_assert(hopper::through_parts(128, 256) == warpgroup_warps * states::state_warpgroups(256));

template void launch_segment_totals<__nv_bfloat16>(const Call<float>&, TileSize, Time, bool, cudaStream_t);
template void launch_states<__nv_bfloat16>(const Call<float>&, TileSize, cudaStream_t);
template void launch_grad_states<__nv_bfloat16>(const Call<float>&, TileSize, cudaStream_t);

}  // namespace tfla::cuda::sm90
