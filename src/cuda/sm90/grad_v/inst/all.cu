#include "cuda/sm90/grad_v/kernel.cuh"

namespace tfla::cuda::sm90 {

template <class T>
void launch_grad_v(const Call<float>& call, cudaStream_t stream) {
  grad_v::launch<T>(call, stream);
}

template void launch_grad_v<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_grad_v<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
