// The kernels of forward.cu for float16, in a file of their own because they take long to compile.
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

template void launch_forward<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
