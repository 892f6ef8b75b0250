// Products of matrices in global memory, streamed through shared memory. Kernels are written in these.
#pragma once

#include "cuda/portable/device.cuh"

namespace tfla::cuda {

// Rows of a strided matrix in global memory; what lies outside is zero.
template <class E>
struct View {
  const E* data;
  std::int64_t stride;
  int rows;
  int cols;
  bool wide;

  __device__ View from_column(int first) const { return {data + first, stride, rows, cols - first, wide}; }
  __device__ View from_row(int first) const { return {data + first * stride, stride, rows - first, cols, wide}; }
};

// Tokens [first, first + count) of a chunk, one head of a [B,T,H,D] tensor.
template <class T>
__device__ __forceinline__ View<T> tokens_of(const Rows& tensor, const Chunk& chunk, int head, int first, int cols) {
  return {row_of<const T>(tensor, chunk.batch, chunk.token + first, head), tensor.token,
          min(tile_rows, chunk.length - first), cols, tensor.wide};
}

// The shared memory of a block.
template <class T>
struct Workspace {
  using Tile = Config<T>;
  static constexpr int larger(int x, int y) { return x > y ? x : y; }
  static constexpr int a_stride = SharedTile<T, tile_rows, Tile::slab>::stride;
  static constexpr int n_stride = SharedTile<T, Tile::slab, Tile::width>::stride;
  static constexpr int p_stride = SharedTile<T, tile_rows, tile_rows>::stride;
  static constexpr int a_size = SharedTile<T, tile_rows, Tile::slab>::size;
  static constexpr int b_size =
      larger(SharedTile<T, Tile::width, Tile::slab>::size, SharedTile<T, Tile::slab, Tile::width>::size);
  static constexpr int p_size = SharedTile<T, tile_rows, tile_rows>::size;
  static constexpr int bytes = (2 * (a_size + b_size) + p_size) * static_cast<int>(sizeof(T));

  T* a;  // [2][64,slab]
  T* b;  // [2][width,slab] or [2][slab,width]
  T* p;  // [64,64]

  __device__ explicit Workspace(unsigned char* memory)
      : a(reinterpret_cast<T*>(memory)), b(a + 2 * a_size), p(b + 2 * b_size) {}
};

// float16 data meets bfloat16 states: both have 16 bits, so the tile is converted where it lies.
template <class T, class E>
__device__ __forceinline__ void convert_tile(T* tile, int stride) {
  if constexpr (!std::is_same_v<T, E>) {
    __syncthreads();
    for (int e = threadIdx.x; e < tile_rows * Config<T>::slab; e += block_threads) {
      T& x = tile[e / Config<T>::slab * stride + e % Config<T>::slab];
      reinterpret_cast<E&>(x) = narrow<E>(to_float(x));
    }
    __syncthreads();
  }
}

// acc += X Y^T, both given by rows.
template <class T, class E, int N>
__device__ __forceinline__ void rows_by_rows(Accumulator<T, N>& acc, const View<T>& x, const View<E>& y,
                                             const Workspace<T>& space) {
  using Tile = Config<T>;
  using Space = Workspace<T>;
  constexpr int stride = Space::a_stride;
  pipeline((x.cols + Tile::slab - 1) / Tile::slab,
           [&](int slab, int buffer) {
             load_tile<tile_rows, Tile::slab>(space.a + buffer * Space::a_size, x.data, x.stride, x.rows,
                                              slab * Tile::slab, x.cols, x.wide);
             load_tile<N, Tile::slab>(reinterpret_cast<E*>(space.b + buffer * Space::b_size), y.data, y.stride, y.rows,
                                      slab * Tile::slab, y.cols, y.wide);
           },
           [&](int, int buffer) {
             T* a = space.a + buffer * Space::a_size;
             convert_tile<T, E>(a, stride);
             block_product<Order::depth_last, Order::depth_last>(
                 acc, reinterpret_cast<const E*>(a), stride,
                 reinterpret_cast<const E*>(space.b + buffer * Space::b_size), stride, Tile::slab);
           });
}

// acc += X Y with X given by rows and Y [depth,N].
template <class T, class E>
__device__ __forceinline__ void rows_by_columns(Accumulator<T, Config<T>::width>& acc, const View<T>& x,
                                                const View<E>& y, const Workspace<T>& space) {
  using Tile = Config<T>;
  using Space = Workspace<T>;
  pipeline((x.cols + Tile::slab - 1) / Tile::slab,
           [&](int slab, int buffer) {
             const int depth = slab * Tile::slab;
             load_tile<tile_rows, Tile::slab>(space.a + buffer * Space::a_size, x.data, x.stride, x.rows, depth, x.cols,
                                              x.wide);
             load_tile<Tile::slab, Tile::width>(reinterpret_cast<E*>(space.b + buffer * Space::b_size),
                                                y.data + depth * y.stride, y.stride, y.rows - depth, 0, y.cols, y.wide);
           },
           [&](int, int buffer) {
             T* a = space.a + buffer * Space::a_size;
             convert_tile<T, E>(a, Space::a_stride);
             block_product<Order::depth_last, Order::depth_first>(
                 acc, reinterpret_cast<const E*>(a), Space::a_stride,
                 reinterpret_cast<const E*>(space.b + buffer * Space::b_size), Space::n_stride, Tile::slab);
           });
}

// acc += P Y or P^T Y: P the [64,64] tile in shared memory, Y [64,N] tokens.
template <Order P, class T>
__device__ __forceinline__ void tile_by_columns(Accumulator<T, Config<T>::width>& acc, const View<T>& y,
                                                const Workspace<T>& space) {
  using Tile = Config<T>;
  using Space = Workspace<T>;
  pipeline(
      tile_rows / Tile::slab,
      [&](int slab, int buffer) {
        const int depth = slab * Tile::slab;
        load_tile<Tile::slab, Tile::width>(space.b + buffer * Space::b_size, y.data + depth * y.stride, y.stride,
                                           y.rows - depth, 0, y.cols, y.wide);
      },
      [&](int slab, int buffer) {
        const T* p = space.p + slab * Tile::slab * (P == Order::depth_last ? 1 : Space::p_stride);
        block_product<P, Order::depth_first>(acc, p, Space::p_stride, space.b + buffer * Space::b_size, Space::n_stride,
                                             Tile::slab);
      });
}

// acc into shared memory as T, neighbours in one store where they lie in one thread.
template <class T, int N>
__device__ __forceinline__ void write_tile(Accumulator<T, N>& acc, T* tile, int stride) {
  using Sums = Accumulator<T, N>;
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) {
    T* row = tile + Sums::row_of(r) * stride;
    if constexpr (is_16_bit<T>) {
#pragma unroll
      for (int c = 0; c < Sums::cols; c += 2) {
        const T pair[2] = {narrow<T>(acc.at(r, c)), narrow<T>(acc.at(r, c + 1))};
        *reinterpret_cast<uint32_t*>(row + Sums::col_of(c)) = *reinterpret_cast<const uint32_t*>(pair);
      }
    } else {
#pragma unroll
      for (int c = 0; c < Sums::cols; ++c) row[Sums::col_of(c)] = narrow<T>(acc.at(r, c));
    }
  }
}

// acc as rows [0, rows) and columns [col, col + N) of tokens in a [B,T,H,D] tensor, through shared memory in pieces of
// 16 bytes. Uses all of the workspace.
template <class T, int N>
__device__ __forceinline__ void store_rows(Accumulator<T, N>& acc, const Rows& tensor, const Chunk& chunk, int head,
                                           int first, int rows, int col, int cols, const Workspace<T>& space) {
  constexpr int stride = SharedTile<T, tile_rows, N>::stride;
  static_assert(SharedTile<T, tile_rows, N>::size * sizeof(T) <= Workspace<T>::bytes);
  constexpr int piece = 16 / sizeof(T), pieces = N / piece;
  __syncthreads();
  write_tile(acc, space.a, stride);
  __syncthreads();
  T* to = row_of<T>(tensor, chunk.batch, chunk.token + first, head) + col;
  for (int p = threadIdx.x; p < rows * pieces; p += block_threads) {
    const int r = p / pieces, c = p % pieces * piece;
    const int count = min(piece, cols - col - c);
    const T* from = space.a + r * stride + c;
    T* at = to + r * tensor.token + c;
    if (tensor.wide && count == piece) {
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < count; ++e) at[e] = from[e];
    }
  }
}

}  // namespace tfla::cuda
