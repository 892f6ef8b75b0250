// Products of a thread block on tiles in shared memory: the one mechanism behind every matrix stage of this backend.
//
//   acc[64,N] += A[64,K] B[K,N]      four warps, 16 rows each; accumulators in registers
//
// 16-bit operands go through the tensor cores with float32 sums; float32 and float64 through ordinary multiply-adds, in
// their own precision.
#pragma once

#include <type_traits>

#include "cuda/arch/mma.cuh"

namespace tfla::cuda {

inline constexpr int block_threads = 128;
inline constexpr int tile_rows = 64;

template <class T>
inline constexpr bool is_16_bit = sizeof(T) == 2;

template <class T>
struct Config {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;  // sums, gates, saved rows
  using Stored = std::conditional_t<is_16_bit<T>, __nv_bfloat16, T>;          // C and dC: float16 would overflow
  using Norm = std::conditional_t<is_16_bit<T>, float, double>;  // n: q.n cancels, and float32 results show it
  static constexpr int slab = is_16_bit<T> ? 64 : sizeof(T) == 4 ? 32 : 16;  // depth of one shared-memory tile
  static constexpr int width = is_16_bit<T> ? 128 : 64;                      // columns of an output tile
  static constexpr int pad = 16 / sizeof(T);                                 // keeps rows off each other's banks
};

template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else
    return static_cast<float>(x);
}

template <class Real, class T>
__device__ __forceinline__ Real widen(T x) {
  if constexpr (is_16_bit<T>)
    return to_float(x);
  else
    return static_cast<Real>(x);
}

template <class T, class Real>
__device__ __forceinline__ T narrow(Real x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

// How an operand lies in shared memory: as [outer][depth], or transposed as [depth][outer].
enum class Order { depth_last, depth_first };

// The part of a [64,N] product that a thread holds.
template <class T, int N>
struct Accumulator {
  using Real = typename Config<T>::Real;
  static constexpr bool tensor = is_16_bit<T>;
  static constexpr int rows = tensor ? 2 : 4;          // per thread
  static constexpr int cols = tensor ? N / 4 : N / 8;  // per thread
  static constexpr int lanes = tensor ? 4 : 8;         // threads that share a row

  // tensor: x[n / 8][4] in the order of mma.sync; else x[row][col]
  Real x[rows * cols];

  __device__ void clear() {
#pragma unroll
    for (int e = 0; e < rows * cols; ++e) x[e] = 0;
  }

  __device__ static int row_of(int r) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return tensor ? 16 * warp + lane / 4 + 8 * r : 16 * warp + lane / 8 + 4 * r;
  }
  __device__ static int col_of(int c) {
    const int lane = threadIdx.x % 32;
    return tensor ? c / 2 * 8 + lane % 4 * 2 + c % 2 : lane % 8 + 8 * c;
  }
  __device__ Real& at(int r, int c) { return tensor ? x[c / 2 * 4 + r * 2 + c % 2] : x[r * cols + c]; }

  // f(r, row, c, col, value&) for every element; r and c count this thread's rows and columns.
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int c = 0; c < cols; ++c) f(r, row_of(r), c, col_of(c), at(r, c));
    }
  }

  // Sum of a per-thread value over the threads that share a row.
  __device__ static Real over_row(Real value) {
#pragma unroll
    for (int offset = 1; offset < lanes; offset *= 2) value += __shfl_xor_sync(0xFFFFFFFFU, value, offset);
    return value;
  }
};

// acc += A B for a depth of `depth` (a multiple of 16 for tensor cores). a and b are in shared memory with rows of
// a_stride and b_stride elements. Operand type E may differ from the accumulator's T (bfloat16 states with float16
// data).
template <Order A, Order B, class E, class T, int N>
__device__ __forceinline__ void block_product(Accumulator<T, N>& acc, const E* a, int a_stride, const E* b,
                                              int b_stride, int depth) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (is_16_bit<E>) {
    const int matrix = lane / 8, line = lane % 8;
    const E* a_row = A == Order::depth_last ? a + (16 * warp + matrix % 2 * 8 + line) * a_stride + matrix / 2 * 8
                                            : a + (matrix / 2 * 8 + line) * a_stride + 16 * warp + matrix % 2 * 8;
    const E* b_row = B == Order::depth_last ? b + (matrix / 2 * 8 + line) * b_stride + matrix % 2 * 8
                                            : b + (matrix % 2 * 8 + line) * b_stride + matrix / 2 * 8;
    const int a_step = A == Order::depth_last ? 16 : 16 * a_stride;
    const int b_step = B == Order::depth_last ? 16 : 16 * b_stride;
    const int n_step = B == Order::depth_last ? 16 * b_stride : 16;
#pragma unroll 4
    for (int k = 0; k < depth; k += 16, a_row += a_step, b_row += b_step) {
      uint32_t left[4];
      if constexpr (A == Order::depth_last)
        arch::load_matrices(left, a_row);
      else
        arch::load_matrices_transposed(left, a_row);
#pragma unroll
      for (int n = 0; n < N / 16; ++n) {
        uint32_t right[4];
        if constexpr (B == Order::depth_last)
          arch::load_matrices(right, b_row + n * n_step);
        else
          arch::load_matrices_transposed(right, b_row + n * n_step);
        auto* d = reinterpret_cast<float(*)[4]>(acc.x);
        arch::multiply_add(d[2 * n], left, right[0], right[1], E{});
        arch::multiply_add(d[2 * n + 1], left, right[2], right[3], E{});
      }
    }
  } else {
    for (int k = 0; k < depth; ++k) {
      typename Config<T>::Real left[Accumulator<T, N>::rows];
#pragma unroll
      for (int r = 0; r < Accumulator<T, N>::rows; ++r) {
        const int row = Accumulator<T, N>::row_of(r);
        left[r] = A == Order::depth_last ? a[row * a_stride + k] : a[k * a_stride + row];
      }
#pragma unroll
      for (int c = 0; c < Accumulator<T, N>::cols; ++c) {
        const int col = Accumulator<T, N>::col_of(c);
        const auto right = B == Order::depth_last ? b[col * b_stride + k] : b[k * b_stride + col];
#pragma unroll
        for (int r = 0; r < Accumulator<T, N>::rows; ++r) acc.at(r, c) += left[r] * right;
      }
    }
  }
}

// ---------------------------------------------------------------- shared-memory tiles

// A tile of Height rows of Width elements, rows padded.
template <class T, int Height, int Width>
struct SharedTile {
  static constexpr int stride = Width + Config<T>::pad;
  static constexpr int size = Height * stride;
};

// Rows [0, rows) and columns [col, col + Width) of a strided matrix with `cols` columns; zero outside. Not waited for.
template <int Height, int Width, class T>
__device__ __forceinline__ void load_tile(T* shared, const T* matrix, std::int64_t stride, int rows, int col, int cols,
                                          bool wide) {
  constexpr int piece = 16 / sizeof(T);
  constexpr int pieces = Width / piece;
  constexpr int shared_stride = SharedTile<T, Height, Width>::stride;
#pragma unroll
  for (int p = threadIdx.x; p < Height * pieces; p += block_threads) {
    const int r = p / pieces, c = p % pieces * piece;
    const int valid = r < rows ? max(0, min(piece, cols - col - c)) : 0;
    const T* from = valid > 0 ? matrix + r * stride + col + c : matrix;
    T* to = shared + r * shared_stride + c;
    if (wide) {
      arch::copy_16(to, from, valid * static_cast<int>(sizeof(T)));
    } else {
#pragma unroll
      for (int e = 0; e < piece; ++e) to[e] = e < valid ? from[e] : narrow<T>(0.0F);
    }
  }
}

// Calls load(slab, buffer) one slab ahead of multiply(slab, buffer); buffer is 0 or 1.
template <class Load, class Multiply>
__device__ __forceinline__ void pipeline(int slabs, const Load& load, const Multiply& multiply) {
  if (slabs == 0) return;
  load(0, 0);
  arch::commit_copies();
  for (int slab = 0; slab < slabs; ++slab) {
    if (slab + 1 < slabs) load(slab + 1, (slab + 1) % 2);
    arch::commit_copies();
    arch::wait_copies<1>();
    __syncthreads();
    multiply(slab, slab % 2);
    __syncthreads();
  }
}

}  // namespace tfla::cuda
