#include "cuda/sm90/grad_qk_reverse/kernel.cuh"

namespace tfla::cuda::sm90 {

static_assert(hopper::reverse_rows == grad_qk_reverse::tile_rows && hopper::warps == warpgroup_warps);

void launch_grad_qk_reverse(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  grad_qk_reverse::launch<__nv_bfloat16>(call, tile, stream);
}

}  // namespace tfla::cuda::sm90
