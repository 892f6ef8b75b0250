// Stage `states`: C = gbar C + (abar K)^T V over the chunks of a sequence, and its reverse-time twin `grad_states`,
// dC = gbar dC + (scale qbar / den Q)^T dH. A CTA owns a tile of the state and keeps it in registers all the way.
//
// Where sequences x heads x tiles do not fill the GPU, sequences are cut into segments. A first pass sums each segment
// up from zero, a scan over these totals gives the state at every segment's start, and the pass proper begins there.
// The gate scan is global, so this is exact: every segment works in the final scale.
#include "cuda/portable/state_walk.cuh"

namespace tfla::cuda {

namespace {

template <class T, Time Direction, Pass Which>
__global__ void __launch_bounds__(block_threads, Config<T>::blocks + (is_16_bit<T> ? 1 : 0))
    states_kernel(Call<typename Config<T>::Real> call, int dqk_tiles, int dhv_tiles) {
  extern __shared__ __align__(16) unsigned char memory[];
  StateWalk<T, Direction, Which> walk(call, memory, dqk_tiles, dhv_tiles);
  if (!walk.has_work()) return;
  walk.begin();
  walk.run();
  walk.finish();
}

int dqk_tiles_of(const Dims& dims) { return (dims.dqk + tile_rows - 1) / tile_rows; }
template <class T>
int dhv_tiles_of(const Dims& dims) {
  return (dims.dhv + Config<T>::width - 1) / Config<T>::width;
}

template <class T, Time Direction>
void launch(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int dqk_tiles = dqk_tiles_of(call.dims), dhv_tiles = dhv_tiles_of<T>(call.dims);
  const std::int64_t ctas = call.dims.sequences * call.dims.heads * call.dims.segments * dqk_tiles * dhv_tiles;
  if (ctas == 0) return;
  constexpr int bytes = StatesShared<T>::bytes;
  if (call.dims.segments > 1) {
    launch_blocks("state_totals", states_kernel<T, Direction, Pass::totals>, ctas, block_threads, bytes, stream, call,
                  dqk_tiles, dhv_tiles);
    launch_segment_scan<T>(call, Direction, stream);
  }
  launch_blocks("states", states_kernel<T, Direction, Pass::proper>, ctas, block_threads, bytes, stream, call,
                dqk_tiles, dhv_tiles);
}

}  // namespace

template <class T>
std::int64_t through_parts(const Call<typename Config<T>::Real>& call) {
  return static_cast<std::int64_t>(dqk_tiles_of(call.dims)) * dhv_tiles_of<T>(call.dims) * block_warps;
}

template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::forward>(call, stream);
}

template <class T>
void launch_grad_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::reverse>(call, stream);
}

#define TFLA_INSTANTIATE(T)                                                            \
  template std::int64_t through_parts<T>(const Call<typename Config<T>::Real>&);       \
  template void launch_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_grad_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
