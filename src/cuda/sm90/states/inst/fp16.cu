// States of float16 heads.
#include "cuda/sm90/states/kernel.cuh"

namespace tfla::cuda::sm90 {

template void launch_segment_starts<__half>(const Call<float>&, cudaStream_t);
template void launch_segment_ends<__half>(const Call<float>&, cudaStream_t);
template void launch_states<__half>(const Call<float>&, cudaStream_t);
template void launch_grad_states<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
