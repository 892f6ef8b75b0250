// Forward of heads of dqk above 256 on Hopper, by the kernel of forward.cu. Scores, states and q.n are sums over the
// columns of dqk, and so are
//
//   O = qbar Q C + P V,  d = qbar q.n + the sums of the rows of P,  H = scale O / max(|scale d|, floor)
//
// up to the division. One kernel makes O and d of the first 256 columns, another one adds those of the rest and
// divides. What the first leaves lies in global memory in the order in which the threads of the other read it, in
// float32. All columns in one kernel would take the registers of four warpgroups for 128 columns of the state.
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

namespace {

using T = __nv_bfloat16;
using forward::Half;
constexpr int M = kernel_dqk / panel, N = 128;

static_assert(hopper::partial_floats(128) ==
              forward::Block<T, M, N, false, false, false, Time::forward, Half::first>::dqk_partial_floats);

template <Half Which>
void launch(const Call<float>& call, cudaStream_t stream) {
  call.rules.normalized ? forward::launch_packing<T, M, N, true, false, false, Time::forward, Which>(call, stream)
                        : forward::launch_packing<T, M, N, false, false, false, Time::forward, Which>(call, stream);
}

}  // namespace

Call<float> part_of_dqk(const Call<float>& call, bool rest) {
  Call<float> part = call;
  const int first = rest ? kernel_dqk : 0;
  part.dims.dqk = rest ? call.dims.dqk - kernel_dqk : kernel_dqk;
  for (Strided* rows : {&part.tensors.q, &part.tensors.k}) rows->data = static_cast<T*>(rows->data) + first;
  for (StridedState* C : {&part.carried.C0, &part.carried.C_last})
    if (C->data != nullptr) C->data = static_cast<float*>(C->data) + first * C->row;
  for (StridedState* n : {&part.carried.n0, &part.carried.n_last})
    if (n->data != nullptr) n->data = static_cast<float*>(n->data) + first;
  return part;
}

void launch_forward_part(const Call<float>& call, bool rest, cudaStream_t stream) {
  const Call<float> part = part_of_dqk(call, rest);
  rest ? launch<Half::last>(part, stream) : launch<Half::first>(part, stream);
}

}  // namespace tfla::cuda::sm90
