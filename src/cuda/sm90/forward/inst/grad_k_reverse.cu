// dK in one kernel on Hopper, in reverse time with dC on the chip: grad_states_v with other names.
//
//   dK = abar V dC^T + dS^T Q,   dS = dH V^T . D           dV = abar K dC + P^T dH
//   dC^T <- gbar dC^T + dH^T (qbar Q)                      dC <- gbar dC + (qbar Q)^T dH
//
// <C, dC> at checkpoints is made of the C that grad_q_forward has left there.
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/twin.h"

namespace tfla::cuda::sm90 {

void launch_grad_k_reverse(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  const Call<float> twin = forward::twin_of_grad_k(call);
  with_row<Kernel::grad_k_reverse, __nv_bfloat16>(tile, [&](auto row) {
    constexpr forward::Options options{.dqk_panels = decltype(row)::rows / panel,
                                       .columns = decltype(row)::columns,
                                       .normalized = false,
                                       .keep = Keep::nothing,
                                       .packed = false,
                                       .direction = Time::reverse,
                                       .dqk_part = forward::DqkPart::all,
                                       .grad_qk = true};
    using C = forward::Config<__nv_bfloat16, options>;
    static_assert(hopper::checkpoint_numbers(C::columns) == 64 * C::dqk_panels * C::columns, "plan/hopper_sizes.h");
    static_assert(hopper::checkpoint_parts(C::columns) == C::state_warpgroups * hopper::warps, "plan/hopper_sizes.h");
    forward::launch_by_packing<__nv_bfloat16, options>(twin, stream, call.tensors.k);
  });
}

}  // namespace tfla::cuda::sm90
