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
  return {.dqk_panels = kernel_dqk / panel,
          .columns = 128,
          .normalized = normalized,
          .keep = forward::Keep::nothing,
          .packed = false,
          .direction = Time::forward,
          .dqk_part = part};
}

template <bool Normalized>
void launch(const Call<float>& call, cudaStream_t stream) {
  const auto part_of = [&](int first, int columns) {
    Call<float> part = call;
    part.dims.dqk = columns;
    for (Strided* rows : {&part.tensors.q, &part.tensors.k}) rows->data = static_cast<T*>(rows->data) + first;
    for (StridedState* C : {&part.carried.C0, &part.carried.C_last})
      if (C->data != nullptr) C->data = static_cast<float*>(C->data) + first * C->row;
    for (StridedState* n : {&part.carried.n0, &part.carried.n_last})
      if (n->data != nullptr) n->data = static_cast<float*>(n->data) + first;
    return part;
  };
  const Call<float> first = part_of(0, kernel_dqk), rest = part_of(kernel_dqk, call.dims.dqk - kernel_dqk);
  launch_segment_starts<T>(first, stream);
  forward::launch<Config<T, part_options(Normalized, DqkPart::first)>>(first, stream);
  launch_segment_starts<T>(rest, stream);
  forward::launch<Config<T, part_options(Normalized, DqkPart::last)>>(rest, stream);
}

}  // namespace

std::int64_t dqk_partial_floats(int dhv) {
  using Partial = forward::DqkPartial<Config<T, part_options(false, DqkPart::first)>>;
  return static_cast<std::int64_t>(forward_tiles(dhv)) * Partial::floats;
}

void launch_forward_dqk512(const Call<float>& call, cudaStream_t stream) {
  call.rules.normalized ? launch<true>(call, stream) : launch<false>(call, stream);
}

}  // namespace tfla::cuda::sm90
