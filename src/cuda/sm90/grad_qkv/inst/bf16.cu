#include "cuda/sm90/grad_qkv/kernel.cuh"

namespace tfla::cuda::sm90 {

template <class T>
void launch_grad_qkv(const Call<float>& call, cudaStream_t stream) {
  grad_qkv::launch<T>(call, stream);
}

template void launch_grad_qkv<__nv_bfloat16>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
