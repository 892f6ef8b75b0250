// Forward of bfloat16 heads of dqk above 256, in two kernels. Scores, states and q.n are sums over the columns of dqk,
// and so are O and d, up to the division:
//
//   O = qbar Q C + P V,  d = qbar q.n + the sums of the rows of P,  H = scale O / max(|scale d|, floor)
//
// One kernel makes O and d of the first 256 columns. The other adds those of the rest and divides. The first leaves O
// and d in global memory, in float32, in the order in which the threads of the other read them. All columns in one
// kernel would take the registers of four warpgroups for 128 columns of the state.
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

namespace {

using T = __nv_bfloat16;
using forward::Config;
using forward::DqkPart;
constexpr forward::Options part_options(bool normalized, DqkPart part) {
  return {.dqk_panels = hopper::dqk_of_a_pass / panel,
          .columns = 128,
          .normalized = normalized,
          .keep = Keep::nothing,
          .packed = false,
          .direction = Time::forward,
          .dqk_part = part};
}

using Partial = forward::DqkPartial<Config<T, part_options(false, DqkPart::first)>>;
static_assert(hopper::partial_floats(128) == Partial::floats, "plan/hopper_sizes.h");

template <DqkPart Part>
void launch(const Call<float>& call, cudaStream_t stream) {
  call.rules.normalized ? forward::launch<Config<T, part_options(true, Part)>>(call, stream)
                        : forward::launch<Config<T, part_options(false, Part)>>(call, stream);
}

}  // namespace

Call<float> part_of_dqk(const Call<float>& call, bool rest) {
  constexpr int first_columns = hopper::dqk_of_a_pass;
  const int first = rest ? first_columns : 0;
  Call<float> part = call;
  part.dims.dqk = rest ? call.dims.dqk - first_columns : first_columns;
  for (Strided* tensor : {&part.tensors.q, &part.tensors.k}) tensor->data = static_cast<T*>(tensor->data) + first;
  for (StridedState* C : {&part.carried.C0, &part.carried.C_last})
    if (C->data != nullptr) C->data = static_cast<float*>(C->data) + first * C->row;
  for (StridedState* n : {&part.carried.n0, &part.carried.n_last})
    if (n->data != nullptr) n->data = static_cast<float*>(n->data) + first;
  return part;
}

void launch_forward_part(const Call<float>& call, bool rest, cudaStream_t stream) {
  const Call<float> part = part_of_dqk(call, rest);
  rest ? launch<DqkPart::last>(part, stream) : launch<DqkPart::first>(part, stream);
}

}  // namespace tfla::cuda::sm90
