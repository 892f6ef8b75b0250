// Forward of bfloat16 heads of dqk to 256.
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

int forward_tiles(int dhv) { return dhv > 64 ? (dhv + 127) / 128 : 1; }

template void launch_forward<__nv_bfloat16>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
