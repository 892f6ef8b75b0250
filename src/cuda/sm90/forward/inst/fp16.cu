// Forward of float16 heads.
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

template void launch_forward<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
