// dQ in one kernel on Hopper, in forward time with C on the chip: forward with other names.
//
//   dQ = qbar dH C^T + dS K,   dS = dH V^T . D             H = qbar Q C + P V, times scale / den
//   C^T <- gbar C^T + V^T (abar K)                         C <- gbar C + (abar K)^T V
//
// scale / den is in the gate vectors of the queries, as in reverse time. C leaves the chip at checkpoints alone, for
// the <C, dC> that grad_k_reverse makes there.
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/twin.h"

namespace tfla::cuda::sm90 {

void launch_grad_q_forward(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  const Call<float> twin = forward::twin_of_grad_q(call);
  with_row<Kernel::grad_q_forward, __nv_bfloat16>(tile, [&](auto row) {
    constexpr forward::Options options{.dqk_panels = decltype(row)::rows / panel,
                                       .columns = decltype(row)::columns,
                                       .normalized = false,
                                       .keep = Keep::nothing,
                                       .packed = false,
                                       .direction = Time::forward,
                                       .dqk_part = forward::DqkPart::all,
                                       .grad_qk = true};
    using C = forward::Config<__nv_bfloat16, options>;
    static_assert(hopper::checkpoint_numbers(C::columns) == 64 * C::dqk_panels * C::columns, "plan/hopper_sizes.h");
    static_assert(hopper::checkpoint_parts(C::columns) == C::state_warpgroups * hopper::warps, "plan/hopper_sizes.h");
    forward::launch_by_packing<__nv_bfloat16, options>(twin, stream, call.tensors.q);
  });
}

}  // namespace tfla::cuda::sm90
