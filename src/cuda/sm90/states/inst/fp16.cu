// The kernels of states.cu for float16, in a file of their own because they take long to compile.
#include "cuda/sm90/states/kernel.cuh"

namespace tfla::cuda::sm90 {

template void launch_segment_totals<__half>(const Call<float>&, Time, bool, cudaStream_t);
template void launch_states<__half>(const Call<float>&, cudaStream_t);
template void launch_grad_states<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
