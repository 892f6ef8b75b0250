// Stage `outputs`: den H = scale qbar (Q C) + (D . Q K^T) V for 64 rows of a chunk and a tile of dhv columns, walking
// over the key tiles of the chunk up to the diagonal. The same kernel, without values, gives backward its denominators;
// with values, and a product with dH in place of the store, the exact normalizer gradient's deta.
#include "cuda/launch.h"
#include "cuda/portable/products.cuh"

namespace tfla::cuda {

namespace {

enum class Wanted { outputs, exact_rows };

template <class T, Wanted Want>
__global__ void __launch_bounds__(block_threads)
    outputs_kernel(Call<typename Config<T>::Real> call, int row_tiles, int dhv_tiles) {
  using Real = typename Config<T>::Real;
  using Stored = typename Config<T>::Stored;
  using Scores = Accumulator<T, tile_rows>;
  constexpr int width = Config<T>::width;
  extern __shared__ __align__(16) unsigned char memory[];
  const Workspace<T> space(memory);

  std::int64_t unit = blockIdx.x;
  const int blocks_across = Want == Wanted::outputs ? dhv_tiles : 1;
  const int block_across = static_cast<int>(unit % blocks_across);
  unit /= blocks_across;
  const int row = static_cast<int>(unit % row_tiles) * tile_rows;
  unit /= row_tiles;
  const int head = static_cast<int>(unit % call.heads);
  const std::int64_t number = unit / call.heads;
  const Chunk chunk = call.chunks[number];
  if (row >= chunk.length) return;
  const int rows = min(tile_rows, chunk.length - row);
  const int qk_head = head / call.group;
  const std::int64_t at = call.vector(chunk, head);
  const auto scale = static_cast<Real>(call.scale);
  const bool has_state = number != chunk.first || call.C0.data != nullptr;
  const View<T> q = tokens_of<T>(call.q, chunk, qk_head, row, call.dqk);

  Real dh_h[Scores::rows] = {};
  // Outputs: one tile of columns per block. Exact rows: all of them in turn, since dh.h sums over them.
  const int last_tile = Want == Wanted::exact_rows ? dhv_tiles : block_across + 1;
  for (int tile = block_across; tile < last_tile; ++tile) {
    const int col = tile * width;
    Accumulator<T, width> O;
    O.clear();
    if (has_state) {
      const View<Stored> C{static_cast<const Stored*>(call.states) + call.state(number, head), call.padded_dhv(),
                           call.dqk, call.padded_dhv(), true};
      rows_by_columns(O, q, C.from_column(col), space);
      O.each([&](int, int i, int, int, Real& value) { value *= i < rows ? scale * call.qbar[at + row + i] : Real{0}; });
    }
    for (int key = 0; key <= row; key += tile_rows) {
      Scores S;
      S.clear();
      rows_by_rows(S, q, tokens_of<T>(call.k, chunk, qk_head, key, call.dqk), space);
      S.each([&](int, int i, int, int j, Real& value) {
        // Set, not multiplied: what lies above the diagonal or outside may be anything.
        const bool seen = i < rows && key + j <= row + i;
        value = seen ? value * (scale * exp2_sum(call.u2[at + row + i], call.c2[at + key + j])) : Real{0};
      });
      write_tile(S, space.p, Workspace<T>::p_stride);
      tile_by_columns<Order::depth_last>(O, tokens_of<T>(call.v, chunk, head, key, call.dhv).from_column(col), space);
    }
    O.each([&](int, int i, int, int, Real& value) { value *= i < rows ? call.inverse[at + row + i] : Real{0}; });
    if constexpr (Want == Wanted::outputs) {
      store_rows(O, call.h, chunk, head, row, rows, col, call.dhv, space);
    } else {
      O.each([&](int r, int i, int, int c, Real& value) {
        if (i >= rows || col + c >= call.dhv) return;
        dh_h[r] += value * widen<Real>(row_of<T>(call.dh, chunk.batch, chunk.token + row + i, head)[col + c]);
      });
      __syncthreads();
    }
  }
  if constexpr (Want == Wanted::exact_rows) {
#pragma unroll
    for (int r = 0; r < Scores::rows; ++r) {
      const int i = Scores::row_of(r);
      const Real product = Scores::over_row(dh_h[r]);
      if (i < rows && threadIdx.x % Scores::lanes == 0) call.deta[at + row + i] = call.slope[at + row + i] * product;
    }
  }
}

template <class T, Wanted Want>
void launch(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int row_tiles = (call.L + tile_rows - 1) / tile_rows;
  const int dhv_tiles = (call.dhv + Config<T>::width - 1) / Config<T>::width;
  const std::int64_t blocks = call.numbers * call.heads * row_tiles * (Want == Wanted::outputs ? dhv_tiles : 1);
  if (blocks == 0) return;
  launch_blocks("outputs", outputs_kernel<T, Want>, blocks, block_threads, Workspace<T>::bytes, stream, call, row_tiles,
                dhv_tiles);
}

}  // namespace

template <class T>
void launch_outputs(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Wanted::outputs>(call, stream);
}

template <class T>
void launch_rows(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  if (call.exact) launch<T, Wanted::exact_rows>(call, stream);
}

#define TFLA_INSTANTIATE(T)                                                             \
  template void launch_outputs<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_rows<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_INSTANTIATE(__nv_bfloat16);
TFLA_INSTANTIATE(__half);
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
