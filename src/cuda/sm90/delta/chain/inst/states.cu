// states_on_chip: residuals, and C at the starts of tiles.
#include "cuda/sm90/delta/chain/kernel.cuh"

namespace tfla::cuda::sm90 {

void launch_delta_states(const delta::Call<float>& call, cudaStream_t stream) {
  delta_rule::launch_pass<delta_rule::Pass::states>("delta states_on_chip", call, stream);
}

}  // namespace tfla::cuda::sm90
