// forward_on_chip: H and the last state.
#include "cuda/sm90/delta/chain/kernel.cuh"

namespace tfla::cuda::sm90 {

void launch_delta_forward(const delta::Call<float>& call, cudaStream_t stream) {
  delta_rule::launch_pass<delta_rule::Pass::outputs>("delta forward_on_chip", call, stream);
}

}  // namespace tfla::cuda::sm90
