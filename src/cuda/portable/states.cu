// Stage `states`: C = gbar C + (abar K)^T V over the chunks of a sequence, and its reverse-time twin `grad_states`,
// dC = gbar dC + (scale qbar / den Q)^T dH. A CTA owns a tile of the state and keeps it in registers all the way.
//
// Where sequences x heads x tiles do not fill the GPU, sequences are cut into segments. A first pass sums each segment
// up from zero, a scan over these totals gives the state at every segment's start, and the pass proper begins there.
// The gate scan is global, so this is exact: every segment works in the final scale.
#include "cuda/arch/dynamic_shared.h"
#include "cuda/portable/state_walk.cuh"

namespace tfla::cuda {

namespace {

template <class T, Time Direction, Pass Which>
__global__ void __launch_bounds__(block_threads, Config<T>::blocks + (is_16_bit<T> ? 1 : 0))
    states_kernel(Call<typename Config<T>::Real> call, int dqk_tiles, int dhv_tiles) {
  TFLA_DYNAMIC_SHARED(16, memory);
  StateWalk<T, Direction, Which> walk(call, memory, dqk_tiles, dhv_tiles);
  if (!walk.has_work()) return;
  walk.begin();
  walk.run();
  walk.finish();
}

// plan/cuda_scratch.h has room for a sum of every warp.
static_assert(tile_rows == 64 && block_warps == 4 && Config<float>::width == 64 && Config<__half>::width == 128);

int dqk_tiles_of(const Dims& dims) { return (dims.dqk + tile_rows - 1) / tile_rows; }
template <class T>
int dhv_tiles_of(const Dims& dims) {
  return (dims.dhv + Config<T>::width - 1) / Config<T>::width;
}

template <class T, Time Direction, Pass Which>
void launch(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int dqk_tiles = dqk_tiles_of(call.dims), dhv_tiles = dhv_tiles_of<T>(call.dims);
  const std::int64_t ctas = call.dims.sequences * call.dims.heads * call.dims.segments * dqk_tiles * dhv_tiles;
  if (ctas == 0) return;
  launch_blocks(Which == Pass::totals ? "segment_totals" : "states", states_kernel<T, Direction, Which>, ctas,
                block_threads, StatesShared<T>::bytes, stream, call, dqk_tiles, dhv_tiles);
}

}  // namespace

template <class T>
void launch_segment_totals(const Call<typename Config<T>::Real>& call, Time direction, cudaStream_t stream) {
  direction == Time::forward ? launch<T, Time::forward, Pass::totals>(call, stream)
                             : launch<T, Time::reverse, Pass::totals>(call, stream);
}

template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::forward, Pass::proper>(call, stream);
}

template <class T>
void launch_grad_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::reverse, Pass::proper>(call, stream);
}

#define TFLA_INSTANTIATE(T)                                                                          \
  template void launch_segment_totals<T>(const Call<typename Config<T>::Real>&, Time, cudaStream_t); \
  template void launch_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t);               \
  template void launch_grad_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
