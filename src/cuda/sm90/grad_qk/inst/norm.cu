#include "cuda/sm90/grad_qk/kernel.cuh"

namespace tfla::cuda::sm90 {

template <class T>
void launch_grad_qk_norm(const Call<float>& call, cudaStream_t stream) {
  grad_qk::launch<T, true>(call, stream);
}

template void launch_grad_qk_norm<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_grad_qk_norm<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
