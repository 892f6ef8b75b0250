#include "cuda/sm90/grad_qk_reverse/kernel.cuh"

namespace tfla::cuda::sm90 {

static_assert(hopper::reverse_rows == grad_qk_reverse::tile_rows && hopper::warps == warpgroup_warps);

void launch_grad_qk_reverse(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  using T = __nv_bfloat16;
  tile.columns == 128 ? grad_qk_reverse::launch_columns<T, 2>(call, stream)
                      : grad_qk_reverse::launch_columns<T, 4>(call, stream);
}

}  // namespace tfla::cuda::sm90
