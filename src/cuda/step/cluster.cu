// Stage `step` for GPUs with clusters (sm_90 and newer), in one launch; many states take two (many.cuh). The CTAs that
// share a state form a cluster. Each reads n and m and updates its own columns of C; the first one writes the new n and
// m after all have read the old ones. A CTA's first rows of C are in flight before it reads the gates.
#include "cuda/launch.h"
#include "cuda/step/many.cuh"
#include "cuda/step/portable.cuh"
#include "cuda/step/token.cuh"

namespace tfla::cuda {

namespace {

// A CTA's tile of the state: ColumnGroups threads side by side on a row of C, four columns each, the others on the rows
// below. Each thread has Ahead rows in flight while it works on as many. Ctas: of a multiprocessor.
template <int ColumnGroups, int Ahead, int Ctas>
struct StepTile {
  static constexpr int column_groups = ColumnGroups;
  static constexpr int ahead = Ahead;
  static constexpr int ctas = Ctas;
};
using Narrow = StepTile<16, 4, 1>;
using Wide = StepTile<32, 2, 5>;
static_assert(Narrow::ahead > Wide::ahead, "few states: more rows in flight");

// CTAs per multiprocessor. Queries and keys of more than 16 bits take more registers.
template <class T, class Tile>
constexpr int resident_ctas = sizeof(T) == 2   ? Tile::ctas
                              : sizeof(T) == 4 ? Tile::ctas / 2 + 1
                                               : 1;

// The rows of C that a thread has in flight, with q and k of each.
template <class T, class Tile>
struct RowsInFlight {
  using Real = typename Config<T>::Real;
  static constexpr int ahead = Tile::ahead;
  static constexpr int row_groups = step_threads / Tile::column_groups;

  Piece<Real> C[ahead];
  T q[ahead], k[ahead];

  // Rows base, base + row_groups ... of those below `rows`.
  __device__ __forceinline__ void load(int base, int rows, const Real* from, std::int64_t stride, const T* queries,
                                       const T* keys) {
#pragma unroll
    for (int x = 0; x < ahead; ++x) {
      const int r = base + x * row_groups;
      if (r >= rows) continue;
      C[x].load(from + r * stride, Piece<Real>::size, true);
      q[x] = queries[r];
      k[x] = keys[r];
    }
  }
};

// An element of n, read before any CTA of the cluster may write n, and its key.
template <class Real>
struct OldNorm {
  bool mine;
  Real n, k;
};

// Writes the new n and m of a state.
template <class T, class Real>
__device__ __forceinline__ void store_n_and_m(const StepCall<Real>& step, const Row<Real>& row, int head, const T* k,
                                              Real* n, const OldNorm<Real>& old, const TokenScalars<Real>& token) {
  if (old.mine) n[threadIdx.x] = decayed(token.decay, old.n, token.weight * old.k);
  for (int r = threadIdx.x + step_threads; r < step.call.dims.dqk; r += step_threads)
    n[r] = decayed(token.decay, n[r], token.weight * widen<Real>(k[r]));
  if (threadIdx.x == 0) static_cast<Real*>(step.m.data)[row.slot * step.m.sequence + head * step.m.head] = token.m;
}

// Writes h of a token in the columns from `first` on, from every warp's sums of C^T q.
template <class T, class Real, int Warps, int Width>
__device__ __forceinline__ void store_h(const Call<Real>& call, const Row<Real>& row, int t, int head, int first,
                                        const Real (&sums)[Warps][Width], Real inverse) {
  for (int c = threadIdx.x; c < min(Width, call.dims.dhv - first); c += step_threads) {
    Real total = 0;
    for (const auto& warp : sums) total += warp[c];
    row_of<T>(call.tensors.h, row.batch, row.token + t, head)[first + c] =
        narrow<T>(static_cast<Real>(call.rules.scale) * total * inverse);
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(step_threads, resident_ctas<T, Tile>)
    step_cluster_kernel(StepCall<typename Config<T>::Real> step, int column_tiles) {
#if __CUDA_ARCH__ >= 900  // never launched on anything older, and not to be compiled for it
  using Real = typename Config<T>::Real;
  constexpr int piece = Piece<Real>::size;
  constexpr int column_groups = Tile::column_groups, ahead = Tile::ahead;
  constexpr int width = column_groups * piece, row_groups = step_threads / column_groups;
  const Call<Real>& call = step.call;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const int tile = static_cast<int>(blockIdx.x % column_tiles);
  const unsigned unit = blockIdx.x / column_tiles;
  const int head = static_cast<int>(unit % call.dims.heads);
  const Row<Real> row(step, unit / call.dims.heads);
  if (!row.has_state(step))  // nor has any other CTA of the cluster
    return row.template clear_outputs<T>(call, head, tile * width, min(width, call.dims.dhv - tile * width));
  const int column = tile * width + threadIdx.x % column_groups * piece;
  const int rows = column < call.dims.dhv ? call.dims.dqk : 0;
  const int first = threadIdx.x / column_groups;
  Real* C = static_cast<Real*>(step.C.data) + row.slot * step.C.sequence + head * step.C.head + column;
  __shared__ Real sums[step_threads / warp_size][width];
  __shared__ TokenScalars<Real> scalars;

  for (int t = 0; t < row.length; ++t) {
    const T* q = row_of<T>(call.tensors.q, row.batch, row.token + t, head / call.dims.group);
    const T* k = row_of<T>(call.tensors.k, row.batch, row.token + t, head / call.dims.group);
    const T* v = row_of<T>(call.tensors.v, row.batch, row.token + t, head) + column;
    RowsInFlight<T, Tile> coming;
    coming.load(first, rows, C, step.C.row, q, k);
    Real* n = static_cast<Real*>(step.n.data) + row.slot * step.n.sequence + head * step.n.head;
    const bool has_n = tile == 0 && threadIdx.x < call.dims.dqk;
    const OldNorm<Real> old{has_n, has_n ? n[threadIdx.x] : Real{0}, has_n ? widen<Real>(k[threadIdx.x]) : Real{0}};
    if (threadIdx.x < warp_size) {
      const TokenScalars<Real> own = token_scalars<T>(step, row, t, head, q, k);
      if (threadIdx.x == 0) scalars = own;
    }
    Real value[piece], out[piece] = {};
#pragma unroll
    for (int e = 0; e < piece; ++e) value[e] = rows > 0 ? widen<Real>(v[e]) : Real{0};
    __syncthreads();
    arch::cluster_arrive_relaxed();  // this CTA has read n and m
    const TokenScalars<Real> own = scalars;
    for (int base = first; base < rows; base += ahead * row_groups) {
      Piece<Real> here[ahead];
      Real query[ahead], input[ahead];
#pragma unroll
      for (int x = 0; x < ahead; ++x) {
        here[x] = coming.C[x];
        query[x] = widen<Real>(coming.q[x]);
        input[x] = own.weight * widen<Real>(coming.k[x]);
      }
      coming.load(base + ahead * row_groups, rows, C, step.C.row, q, k);
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
    sum_rows<column_groups>(out, sums);
    __syncthreads();
    store_h<T>(call, row, t, head, tile * width, sums, own.inverse);
    arch::cluster_wait();  // every CTA has read n and m
    if (tile == 0) store_n_and_m(step, row, head, k, n, old, own);
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
  constexpr int narrow_columns = Narrow::column_groups * Piece<float>::size;
  columns == narrow_columns ? launch<Narrow, T>(step, stream) : launch<Wide, T>(step, stream);
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
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
