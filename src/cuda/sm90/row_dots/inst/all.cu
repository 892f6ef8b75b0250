#include "cuda/sm90/row_dots/kernel.cuh"

namespace tfla::cuda::sm90 {

template <class T>
void launch_row_dots(const Call<float>& call, cudaStream_t stream) {
  row_dots::launch<T>(call, stream);
}

template void launch_row_dots<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_row_dots<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
