// Products of matrices in global memory, streamed through shared memory. Kernels are written in these.
#pragma once

#include "cuda/common/device.cuh"
#include "cuda/portable/block_gemm.cuh"
#include "plan/kernel_table.h"

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
  __device__ View columns(int first, int most) const {
    return {data + first, stride, rows, min(cols - first, most), wide};
  }
  __device__ View from_row(int first) const { return {data + first * stride, stride, rows - first, cols, wide}; }
};

// Tokens [first, first + count) of a chunk, one head of a [B,T,H,D] tensor.
template <class T>
__device__ __forceinline__ View<T> tokens_of(const Strided& tensor, const Chunk& chunk, int head, int first, int cols) {
  return {row_of<const T>(tensor, chunk.batch, chunk.token + first, head), tensor.token,
          min(tile_rows, chunk.length - first), cols, tensor.wide};
}

// C or dC of a chunk, among the stored ones.
template <class T>
__device__ __forceinline__ View<typename Config<T>::Stored> chunk_state(const Call<typename Config<T>::Real>& call,
                                                                        const void* states, std::int64_t number,
                                                                        int head) {
  return {static_cast<const typename Config<T>::Stored*>(states) + call.dims.state(number, head),
          call.dims.padded_dhv(), call.dims.dqk, call.dims.padded_dhv(), true};
}

// The shared memory of a CTA.
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
  static constexpr int p_terms = is_16_bit<T> ? 2 : 1;
  static constexpr int bytes = (2 * (a_size + b_size) + p_terms * p_size) * static_cast<int>(sizeof(T));
  static_assert(bytes <= most_shared_bytes(Needs::any_gpu), "what a CTA of every GPU may have");

  T* a;  // [2][64,slab]
  T* b;  // [2][width,slab] or [2][slab,width]
  T* p;  // [terms][64,64]

  __device__ explicit Workspace(unsigned char* memory)
      : a(reinterpret_cast<T*>(memory)), b(a + 2 * a_size), p(b + 2 * b_size) {}
};

// float16 data meets bfloat16 states: every float16 is the sum of two bfloat16, the first written where the number
// lies, the second into `rest`.
template <class T, class E>
__device__ __forceinline__ void convert_tile(T* tile, T* rest, int stride) {
  if constexpr (!std::is_same_v<T, E>) {
    __syncthreads();
    for (int e = threadIdx.x * 2; e < tile_rows * Config<T>::slab; e += block_threads * 2) {
      const int at = e / Config<T>::slab * stride + e % Config<T>::slab;
      auto& pair = *reinterpret_cast<uint32_t*>(tile + at);
      split<E>(arch::unpack(pair, T{}), pair, *reinterpret_cast<uint32_t*>(rest + at));
    }
    __syncthreads();
  }
}

// acc += A B with A a tile of rows, in the type E of B. P is not in use yet while a product with states runs.
template <class T, class E, Order B, int N>
__device__ __forceinline__ void converted_product(Accumulator<T, N>& acc, const Workspace<T>& space, int buffer,
                                                  int b_stride) {
  using Space = Workspace<T>;
  static_assert(Space::a_size <= Space::p_terms * Space::p_size);
  constexpr int terms = std::is_same_v<T, E> ? 1 : 2;
  T* a = space.a + buffer * Space::a_size;
  convert_tile<T, E>(a, space.p, Space::a_stride);
  block_product<Order::depth_last, B, terms>(acc, reinterpret_cast<const E*>(a), Space::a_stride,
                                             reinterpret_cast<const E*>(space.b + buffer * Space::b_size), b_stride,
                                             Config<T>::slab, static_cast<int>(space.p - a));
}

// Products, as loads and multiplications of one slab of their depth.

// acc[64,N] += X Y^T, both given by rows.
template <class T, class E, int N>
struct RowsByRows {
  using Tile = Config<T>;
  using Space = Workspace<T>;
  View<T> x;
  View<E> y;

  __device__ int slabs() const { return (x.cols + Tile::slab - 1) / Tile::slab; }
  __device__ void load(const Space& space, int slab, int buffer) const {
    load_tile<tile_rows, Tile::slab>(space.a + buffer * Space::a_size, x.data, x.stride, x.rows, slab * Tile::slab,
                                     x.cols, x.wide);
    load_tile<N, Tile::slab>(reinterpret_cast<E*>(space.b + buffer * Space::b_size), y.data, y.stride, y.rows,
                             slab * Tile::slab, y.cols, y.wide);
  }
  __device__ void multiply(Accumulator<T, N>& acc, const Space& space, int, int buffer) const {
    converted_product<T, E, Order::depth_last>(acc, space, buffer, Space::a_stride);
  }
};

// acc += X Y with X given by rows and Y [depth,width].
template <class T, class E>
struct RowsByColumns {
  using Tile = Config<T>;
  using Space = Workspace<T>;
  View<T> x;
  View<E> y;

  __device__ int slabs() const { return (x.cols + Tile::slab - 1) / Tile::slab; }
  __device__ void load(const Space& space, int slab, int buffer) const {
    const int depth = slab * Tile::slab;
    load_tile<tile_rows, Tile::slab>(space.a + buffer * Space::a_size, x.data, x.stride, x.rows, depth, x.cols, x.wide);
    load_tile<Tile::slab, Tile::width>(reinterpret_cast<E*>(space.b + buffer * Space::b_size),
                                       y.data + depth * y.stride, y.stride, y.rows - depth, 0, y.cols, y.wide);
  }
  __device__ void multiply(Accumulator<T, Tile::width>& acc, const Space& space, int, int buffer) const {
    converted_product<T, E, Order::depth_first>(acc, space, buffer, Space::n_stride);
  }
};

// acc += P Y or P^T Y: P the [64,64] tile in shared memory, in all its digits or rounded; Y [64,width] tokens.
enum class Digits { all, rounded };
template <Order P, Digits Kept, class T>
struct TileByColumns {
  using Tile = Config<T>;
  using Space = Workspace<T>;
  View<T> y;

  __device__ int slabs() const { return tile_rows / Tile::slab; }
  __device__ void load(const Space& space, int slab, int buffer) const {
    const int depth = slab * Tile::slab;
    load_tile<Tile::slab, Tile::width>(space.b + buffer * Space::b_size, y.data + depth * y.stride, y.stride,
                                       y.rows - depth, 0, y.cols, y.wide);
  }
  __device__ void multiply(Accumulator<T, Tile::width>& acc, const Space& space, int slab, int buffer) const {
    const T* p = space.p + slab * Tile::slab * (P == Order::depth_last ? 1 : Space::p_stride);
    constexpr int terms = Kept == Digits::all ? Space::p_terms : 1;
    block_product<P, Order::depth_first, terms>(acc, p, Space::p_stride, space.b + buffer * Space::b_size,
                                                Space::n_stride, Tile::slab, Space::p_size);
  }
};

// Runs one product after another. The first slab of the next product is in flight while the last slab of this one is
// multiplied. A slab takes one barrier: after it the slab is there, and nobody reads the other buffer any more.
template <class T>
struct Stream {
  Workspace<T> space;
  int buffer = 0;

  template <class Product>
  __device__ __forceinline__ void start(const Product& first) {
    __syncthreads();  // whatever used the buffers before is done
    first.load(space, 0, buffer);
    arch::commit_copies();
  }

  // acc += product, whose first slab is in flight; load_next(buffer) starts the loads of what follows.
  template <class Sums, class Product, class LoadNext>
  __device__ __forceinline__ void run(Sums& acc, const Product& product, const LoadNext& load_next) {
    const int slabs = product.slabs();
    for (int slab = 0; slab < slabs; ++slab) {
      arch::wait_copies<0>();
      __syncthreads();
      if (slab + 1 < slabs)
        product.load(space, slab + 1, 1 - buffer);
      else
        load_next(1 - buffer);
      arch::commit_copies();
      product.multiply(acc, space, slab, buffer);
      buffer = 1 - buffer;
    }
  }
};

// What the rows of a square of scores are multiplied by, and what is added, before their gates.
template <class T>
struct RowTerms {
  using Real = typename Config<T>::Real;
  Real factor[Accumulator<T, tile_rows>::rows] = {};
  Real addend[Accumulator<T, tile_rows>::rows] = {};
};

// S = D . (factor S + addend) in one square of a chunk, D_tj = exp(u_t + c_j); zero, not multiplied by it, above the
// diagonal and outside the chunk, where S may be anything. `at`: where the vectors of chunk and head begin.
template <class T>
__device__ __forceinline__ void gate_square(Accumulator<T, tile_rows>& S, const Call<typename Config<T>::Real>& call,
                                            const Chunk& chunk, std::int64_t at, int row, int col,
                                            const RowTerms<T>& terms) {
  using Real = typename Config<T>::Real;
  using Square = Accumulator<T, tile_rows>;
  Log<Real> u[Square::rows];
  int last_seen[Square::rows];  // column, in the square
#pragma unroll
  for (int r = 0; r < Square::rows; ++r) {
    const int t = row + Square::row_of(r);
    const bool inside = t < chunk.length;
    u[r] = call.gates.u[at + (inside ? t : row)];
    last_seen[r] = inside ? t - col : -1;
  }
  const int columns = chunk.length - col;
#pragma unroll
  for (int c = 0; c < Square::cols; ++c) {
    const int j = Square::col_of(c);
    const auto log_c = call.gates.log_c[at + col + min(j, columns - 1)];
#pragma unroll
    for (int r = 0; r < Square::rows; ++r) {
      const Real gated = (S.at(r, c) * terms.factor[r] + terms.addend[r]) * exp_sum(u[r], log_c);
      S.at(r, c) = j <= last_seen[r] ? gated : Real{0};
    }
  }
}

// acc into shared memory as T, neighbours in one store where they lie in one thread. With two Terms (16 bit) what
// rounding took away goes to a second tile, `second` further on.
template <int Terms = 1, class T, int N>
__device__ __forceinline__ void write_tile(Accumulator<T, N>& acc, T* tile, int stride, int second = 0) {
  using Sums = Accumulator<T, N>;
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) {
    T* row = tile + Sums::row_of(r) * stride;
    if constexpr (is_16_bit<T>) {
#pragma unroll
      for (int c = 0; c < Sums::cols; c += 2) {
        uint32_t high, low;
        split<T>({acc.at(r, c), acc.at(r, c + 1)}, high, low);
        *reinterpret_cast<uint32_t*>(row + Sums::col_of(c)) = high;
        if (Terms == 2) *reinterpret_cast<uint32_t*>(row + second + Sums::col_of(c)) = low;
      }
    } else {
#pragma unroll
      for (int c = 0; c < Sums::cols; ++c) row[Sums::col_of(c)] = narrow<T>(acc.at(r, c));
    }
  }
}

// A second product of each square, product(tile), and take(S), which is given its result while the first one, gated,
// lies in P.
template <class Product, class Take>
struct Beside {
  static constexpr bool wanted = true;
  Product product;
  Take take;
};
struct NothingBeside {
  static constexpr bool wanted = false;
};

// acc += sum over the squares of a row or column of the chunk of gated scores times values: the walk that dQ, dK, dV
// and H have in common. scores(tile) and values(tile) give the two products of a square, gate(S, tile) what happens
// between them; the loads of scores(first) are in flight.
template <class T, class Scores, class Values, class Gate, class More = NothingBeside>
__device__ __forceinline__ void walk_squares(Accumulator<T, Config<T>::width>& acc, Stream<T>& stream, int first,
                                             int last, const Scores& scores, const Values& values, const Gate& gate,
                                             const More& beside = {}) {
  for (int tile = first; tile <= last; tile += tile_rows) {
    Accumulator<T, tile_rows> S;
    S.clear();
    const auto load_values = [&](int buffer) { values(tile).load(stream.space, 0, buffer); };
    if constexpr (More::wanted)
      stream.run(S, scores(tile), [&](int buffer) { beside.product(tile).load(stream.space, 0, buffer); });
    else
      stream.run(S, scores(tile), load_values);
    gate(S, tile);
    write_tile<Workspace<T>::p_terms>(S, stream.space.p, Workspace<T>::p_stride, Workspace<T>::p_size);
    if constexpr (More::wanted) {
      S.clear();
      stream.run(S, beside.product(tile), load_values);
      beside.take(S);
    }
    stream.run(acc, values(tile), [&](int buffer) {
      if (tile + tile_rows <= last) scores(tile + tile_rows).load(stream.space, 0, buffer);
    });
  }
}

// acc as rows [0, rows) and columns [col, col + N) of tokens in a [B,T,H,D] tensor, through shared memory in pieces of
// 16 bytes. Uses all of the workspace.
template <class T, int N>
__device__ __forceinline__ void store_rows(Accumulator<T, N>& acc, const Strided& tensor, const Chunk& chunk, int head,
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
