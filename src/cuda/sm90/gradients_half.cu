// The kernels of gradients.cu for float16, in a file of their own because they take long to compile.
#include "cuda/sm90/gradients/kernel.cuh"

namespace tfla::cuda::sm90 {

template void launch_gradients<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
