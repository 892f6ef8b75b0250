// grad_states_on_chip: dX and dV, and dC at the ends of tiles.
#include "cuda/sm90/delta/chain/kernel.cuh"

namespace tfla::cuda::sm90 {

void launch_delta_grad_states(const delta::Call<float>& call, cudaStream_t stream) {
  delta_rule::launch_pass<delta_rule::Pass::gradients>("delta grad_states_on_chip", call, stream);
}

}  // namespace tfla::cuda::sm90
