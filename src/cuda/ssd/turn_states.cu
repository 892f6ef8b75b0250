// States between the caller's [N,H,P,S] and the scan's [N,H,S,P]: transposed by tiles in shared memory, so that both
// sides are read and written along their rows.
#include "cuda/arch/cluster.cuh"
#include "cuda/common/device.cuh"
#include "cuda/device.h"
#include "cuda/ssd/call.h"

namespace tfla::cuda::ssd {

namespace {

constexpr int side = 32;
constexpr int rows_at_once = 8;
constexpr int threads = side * rows_at_once;

__device__ __forceinline__ std::int64_t offset(const Matrices& to, std::int64_t sequence, int head) {
  return sequence * to.sequence + head * to.head;
}

template <class Real>
__global__ void __launch_bounds__(threads) turn_states_kernel(Turn<Real> turn, int row_tiles, int column_tiles) {
  __shared__ Real tile[side][side + 1];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const int lane = static_cast<int>(threadIdx.x) % side, group = static_cast<int>(threadIdx.x) / side;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; at < turn.zero_count;
       at += static_cast<std::int64_t>(gridDim.x) * threads)
    turn.zeros[at] = 0;
  std::int64_t unit = blockIdx.x;
  const int first_column = static_cast<int>(unit % column_tiles) * side;
  unit /= column_tiles;
  const int first_row = static_cast<int>(unit % row_tiles) * side;
  unit /= row_tiles;
  const std::int64_t sequence = unit / turn.heads;
  const int head = static_cast<int>(unit % turn.heads);
  const Real* from = static_cast<const Real*>(turn.from.data) + offset(turn.from, sequence, head);
  Real* to = static_cast<Real*>(turn.to.data) + offset(turn.to, sequence, head);
#pragma unroll
  for (int r = group; r < side; r += rows_at_once) {
    const std::int64_t row = first_row + r, column = first_column + lane;
    if (row < turn.rows && column < turn.columns) tile[r][lane] = from[row * turn.from.row + column * turn.from.column];
  }
  __syncthreads();
#pragma unroll
  for (int c = group; c < side; c += rows_at_once) {
    const std::int64_t row = first_row + lane, column = first_column + c;
    if (row < turn.rows && column < turn.columns) to[column * turn.to.row + row * turn.to.column] = tile[lane][c];
  }
}

}  // namespace

template <class Real>
void launch_turn_states(const Turn<Real>& turn, cudaStream_t stream) {
  const auto tiles = [](int size) { return (size + side - 1) / side; };
  const std::int64_t ctas = turn.units * tiles(turn.rows) * tiles(turn.columns);
  if (ctas == 0) return;
  launch_chained("ssd turn_states", turn_states_kernel<Real>, ctas, threads, 0, stream, turn, tiles(turn.rows),
                 tiles(turn.columns));
}

template void launch_turn_states(const Turn<float>&, cudaStream_t);
template void launch_turn_states(const Turn<double>&, cudaStream_t);

}  // namespace tfla::cuda::ssd
