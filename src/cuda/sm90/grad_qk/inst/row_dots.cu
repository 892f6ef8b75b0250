// Stage `rows` on Hopper: dh.h of every token, for the exact gradient of the normalizer. The kernel is that of stage
// `keys` with other consumers (keys/rows.cuh), in a file of its own for the sake of compile time.
#include "cuda/sm90/grad_qk/kernel.cuh"

namespace tfla::cuda::sm90 {

template <class T>
void launch_row_dots(const Call<float>& call, cudaStream_t stream) {
  keys::launch<T, keys::Pass::rows>(call, stream);
}

template void launch_row_dots<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_row_dots<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
