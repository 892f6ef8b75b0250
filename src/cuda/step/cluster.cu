// Stage `step` for GPUs with thread block clusters (sm_90 and newer), in one launch but for many states. The blocks
// that share a state form a cluster: each reads n and m, works on its own columns of C, and the first writes the new n
// and m when all have read the old ones. Everything of C that a block needs is on its way before the first gate is
// read.
#include "cuda/launch.h"
#include "cuda/step/many.cuh"
#include "cuda/step/portable.cuh"
#include "cuda/step/token.cuh"

namespace tfla::cuda {

namespace {

// A block's part of the state: ColumnGroups threads side by side on a row of C, four columns each, the others on the
// rows below. Each thread has `Ahead` rows on their way while it works on as many.
template <int ColumnGroups, int Ahead, int Blocks>
struct StepTile {
  static constexpr int column_groups = ColumnGroups;
  [[maybe_unused]] static constexpr int ahead = Ahead;
  static constexpr int blocks = Blocks;  // on a multiprocessor
};
using Narrow = StepTile<16, 4, 1>;
using Wide = StepTile<32, 2, 5>;

// Queries and keys take more registers where they are not 16-bit numbers.
template <class T, class Tile>
constexpr int tile_blocks = sizeof(T) == 2   ? Tile::blocks
                            : sizeof(T) == 4 ? Tile::blocks / 2 + 1
                                             : 1;

template <class T, class Tile>
__global__ void __launch_bounds__(step_threads, tile_blocks<T, Tile>)
    step_cluster_kernel(StepCall<typename Config<T>::Real> step, int column_tiles) {
#if __CUDA_ARCH__ >= 900  // never launched on anything older, and not to be compiled for it
  using Real = typename Config<T>::Real;
  constexpr int piece = Piece<Real>::size;
  constexpr int ColumnGroups = Tile::column_groups;
  constexpr int width = ColumnGroups * piece;
  constexpr int row_groups = step_threads / ColumnGroups;
  constexpr int ahead = Tile::ahead;
  const Call<Real>& call = step.call;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const int tile = static_cast<int>(blockIdx.x % column_tiles);
  const unsigned unit = blockIdx.x / column_tiles;
  const int head = static_cast<int>(unit % call.dims.heads);
  const Row<Real> row(step, unit / call.dims.heads);
  if (!row.has_state(step))  // nor has any block of the cluster
    return row.template clear_outputs<T>(call, head, tile * width, min(width, call.dims.dhv - tile * width));
  const int column = tile * width + threadIdx.x % ColumnGroups * piece;
  const int rows = column < call.dims.dhv ? call.dims.dqk : 0;
  const int first = threadIdx.x / ColumnGroups;
  constexpr int most_packed_segments = step_threads / (ColumnGroups > 32 ? ColumnGroups : 32);
  Real* C = static_cast<Real*>(step.C.data) + row.slot * step.C.sequence + head * step.C.head + column;
  __shared__ Real sums[most_packed_segments][width];
  __shared__ TokenScalars<Real> scalars;

  for (int t = 0; t < row.length; ++t) {
    const T* q = row_of<T>(call.tensors.q, row.batch, row.token + t, head / call.dims.group);
    const T* k = row_of<T>(call.tensors.k, row.batch, row.token + t, head / call.dims.group);
    const T* v = row_of<T>(call.tensors.v, row.batch, row.token + t, head) + column;
    Piece<Real> coming[ahead];
    T coming_q[ahead], coming_k[ahead];
    const auto load = [&](int base) {
#pragma unroll
      for (int x = 0; x < ahead; ++x) {
        const int r = base + x * row_groups;
        if (r >= rows) continue;
        coming[x].load(C + r * step.C.row, piece, true);
        coming_q[x] = q[r];
        coming_k[x] = k[r];
      }
    };
    load(first);
    // What the end of the step needs of n, read before anybody may write it.
    Real* n = static_cast<Real*>(step.n.data) + row.slot * step.n.sequence + head * step.n.head;
    const bool has_n = tile == 0 && threadIdx.x < call.dims.dqk;
    const Real old_n = has_n ? n[threadIdx.x] : Real{0}, new_k = has_n ? widen<Real>(k[threadIdx.x]) : Real{0};
    if (threadIdx.x < 32) {
      const TokenScalars<Real> own = token_scalars<T>(step, row, t, head, q, k);
      if (threadIdx.x == 0) scalars = own;
    }
    Real value[piece], out[piece] = {};
#pragma unroll
    for (int e = 0; e < piece; ++e) value[e] = rows > 0 ? widen<Real>(v[e]) : Real{0};
    __syncthreads();
    arch::cluster_arrive_relaxed();  // this block has read n and m
    const TokenScalars<Real> own = scalars;
    for (int base = first; base < rows; base += ahead * row_groups) {
      Piece<Real> here[ahead];
      Real query[ahead], input[ahead];
#pragma unroll
      for (int x = 0; x < ahead; ++x) {
        here[x] = coming[x];
        query[x] = widen<Real>(coming_q[x]);
        input[x] = own.weight * widen<Real>(coming_k[x]);
      }
      load(base + ahead * row_groups);
#pragma unroll
      for (int x = 0; x < ahead; ++x) {
        const int r = base + x * row_groups;
        if (r >= rows) continue;
#pragma unroll
        for (int e = 0; e < piece; ++e) {
          here[x].x[e] = decayed(own.decay, here[x].x[e], input[x] * value[e]);
          out[e] += query[x] * here[x].x[e];
        }
        here[x].store(C + r * step.C.row, piece, true);
      }
    }
    // Sums over the rows: inside the warp where it has several, then over the parts.
#pragma unroll
    for (int e = 0; e < piece; ++e) {
#pragma unroll
      for (int offset = ColumnGroups; offset < 32; offset *= 2) out[e] += __shfl_xor_sync(0xFFFFFFFFU, out[e], offset);
      if (ColumnGroups >= 32 || threadIdx.x % 32 < ColumnGroups)
        sums[threadIdx.x / max(ColumnGroups, 32)][threadIdx.x % ColumnGroups * piece + e] = out[e];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < min(width, call.dims.dhv - tile * width); c += step_threads) {
      Real total = 0;
      for (const auto& part : sums) total += part[c];
      row_of<T>(call.tensors.h, row.batch, row.token + t, head)[tile * width + c] =
          narrow<T>(static_cast<Real>(call.rules.scale) * total * own.inverse);
    }
    arch::cluster_wait();  // every block has read n and m
    if (tile == 0) {
      if (has_n) n[threadIdx.x] = decayed(own.decay, old_n, own.weight * new_k);
      for (int r = threadIdx.x + step_threads; r < call.dims.dqk; r += step_threads)
        n[r] = decayed(own.decay, n[r], own.weight * widen<Real>(k[r]));
      if (threadIdx.x == 0) static_cast<Real*>(step.m.data)[row.slot * step.m.sequence + head * step.m.head] = own.m;
    }
    if (t + 1 < row.length) {
      arch::cluster_arrive();
      arch::cluster_wait();  // the new n and m are there
    }
  }
#endif
}

template <class Tile, class T>
void launch(const StepCall<typename Config<T>::Real>& step, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  constexpr int width = Tile::column_groups * Piece<Real>::size;
  const int tiles = (step.call.dims.dhv + width - 1) / width;
  launch_clusters("step_cluster", step_cluster_kernel<T, Tile>, static_cast<unsigned>(tiles),
                  step.call.dims.sequences * step.call.dims.heads * tiles, step_threads, 0, stream, step, tiles);
}

}  // namespace

template <class T>
void launch_step_cluster(const StepCall<typename Config<T>::Real>& step, int columns, cudaStream_t stream) {
  columns == Narrow::column_groups* Piece<float>::size ? launch<Narrow, T>(step, stream)
                                                       : launch<Wide, T>(step, stream);
}

template <class T>
void launch_step_many(const StepCall<float>& step, cudaStream_t stream) {
  launch_many<T>(step, stream);
}

template void launch_step_many<__nv_bfloat16>(const StepCall<float>&, cudaStream_t);
template void launch_step_many<__half>(const StepCall<float>&, cudaStream_t);
template void launch_step_many<float>(const StepCall<float>&, cudaStream_t);

#define TFLA_INSTANTIATE(T) \
  template void launch_step_cluster<T>(const StepCall<typename Config<T>::Real>&, int, cudaStream_t)
TFLA_INSTANTIATE(__nv_bfloat16);
TFLA_INSTANTIATE(__half);
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
