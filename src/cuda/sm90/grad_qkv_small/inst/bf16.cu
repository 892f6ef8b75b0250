#include "cuda/sm90/grad_qkv_small/kernel.cuh"

namespace tfla::cuda::sm90 {

void launch_grad_qkv_small(const Call<float>& call, cudaStream_t stream) { grad_qkv_small::launch(call, stream); }

}  // namespace tfla::cuda::sm90
