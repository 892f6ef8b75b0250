// Products of a CTA on tiles in shared memory: the one mechanism behind every matrix stage of the portable kernels.
//
//   acc[64,N] += A[64,K] B[K,N]      four warps, 16 rows each; accumulators in registers
//
// 16-bit operands run on the tensor cores with float32 sums. float32 and float64 take ordinary multiply-adds in their
// own precision.
#pragma once

#include "cuda/arch/copy.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/common/types.h"

namespace tfla::cuda {

inline constexpr int block_threads = 128;
inline constexpr int block_warps = block_threads / 32;
inline constexpr int tile_rows = 64;

// How an operand lies in shared memory: as [outer][depth], or transposed as [depth][outer].
enum class Order { depth_last, depth_first };

// The part of a [64,N] product that a thread holds.
template <class T, int N>
struct Accumulator {
  using Real = typename Config<T>::Real;
  static constexpr bool tensor = Config<T>::tensor_cores;
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

// Ordinary multiply-adds. Sums of a few products are added up, not single products: with long sums that saves a digit.
template <Order A, Order B, class E, class T, int N, class Weight>
__device__ __forceinline__ void plain_product(Accumulator<T, N>& acc, const E* a, int a_stride, const E* b,
                                              int b_stride, int depth, const Weight& weight) {
  using Sums = Accumulator<T, N>;
  using Real = typename Config<T>::Real;
  constexpr int run = 32 / sizeof(Real);
  for (int k = 0; k < depth; k += run) {
    Real left[run][Sums::rows];
#pragma unroll
    for (int e = 0; e < run; ++e) {
#pragma unroll
      for (int r = 0; r < Sums::rows; ++r) {
        const int row = Sums::row_of(r);
        left[e][r] = weight(k + e) * (A == Order::depth_last ? a[row * a_stride + k + e] : a[(k + e) * a_stride + row]);
      }
    }
#pragma unroll
    for (int c = 0; c < Sums::cols; ++c) {
      const int col = Sums::col_of(c);
      Real sums[Sums::rows] = {};
#pragma unroll
      for (int e = 0; e < run; ++e) {
        const Real right = B == Order::depth_last ? b[col * b_stride + k + e] : b[(k + e) * b_stride + col];
#pragma unroll
        for (int r = 0; r < Sums::rows; ++r) sums[r] += left[e][r] * right;
      }
#pragma unroll
      for (int r = 0; r < Sums::rows; ++r) acc.at(r, c) += sums[r];
    }
  }
}

// acc += A B for a depth of `depth` (a multiple of 16 for tensor cores). a and b are in shared memory with rows of
// a_stride and b_stride elements. Operand type E may differ from the accumulator's T (bfloat16 states with float16
// data). With two Terms, 16-bit A is the sum of the tiles at a and at a + second.
template <Order A, Order B, int Terms = 1, class E, class T, int N>
__device__ __forceinline__ void block_product(Accumulator<T, N>& acc, const E* a, int a_stride, const E* b,
                                              int b_stride, int depth, int second = 0) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (Config<E>::tensor_cores) {
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
      uint32_t left[Terms][4];
#pragma unroll
      for (int term = 0; term < Terms; ++term) {
        if constexpr (A == Order::depth_last)
          arch::load_tiles(left[term], arch::shared_address(a_row + term * second));
        else
          arch::load_tiles_transposed(left[term], arch::shared_address(a_row + term * second));
      }
#pragma unroll
      for (int n = 0; n < N / 16; ++n) {
        uint32_t right[4];
        if constexpr (B == Order::depth_last)
          arch::load_tiles(right, arch::shared_address(b_row + n * n_step));
        else
          arch::load_tiles_transposed(right, arch::shared_address(b_row + n * n_step));
        auto* d = reinterpret_cast<float(*)[4]>(acc.x);
#pragma unroll
        for (int term = 0; term < Terms; ++term) {
          arch::multiply_add(d[2 * n], left[term], right[0], right[1], E{});
          arch::multiply_add(d[2 * n + 1], left[term], right[2], right[3], E{});
        }
      }
    }
  } else {
    plain_product<A, B>(acc, a, a_stride, b, b_stride, depth, [](int) { return typename Config<T>::Real{1}; });
  }
}

// x as the sum of two 16-bit numbers: twice the digits.
template <class E>
__device__ __forceinline__ void split(float2 x, uint32_t& high, uint32_t& low) {
  high = arch::pack(x, E{});
  const float2 rounded = arch::unpack(high, E{});
  low = arch::pack({x.x - rounded.x, x.y - rounded.y}, E{});
}

// acc += (scale w . A)^T B, with A [depth,64] and B [depth,N] in shared memory and weights w on the depth. Weighted, A
// no longer fits into 16 bits: the operand is the sum of two such numbers. Rounding A instead was the largest part of
// the error of the forget gate's gradient.
template <class T, int N>
__device__ __forceinline__ void weighted_product(Accumulator<T, N>& acc, const T* a, int a_stride, const T* b,
                                                 int b_stride, int depth, const typename Config<T>::Real* weights,
                                                 typename Config<T>::Real scale) {
  if constexpr (Config<T>::tensor_cores) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int matrix = lane / 8, line = lane % 8;
    const T* a_row = a + (matrix / 2 * 8 + line) * a_stride + 16 * warp + matrix % 2 * 8;
    const T* b_row = b + (matrix % 2 * 8 + line) * b_stride + matrix / 2 * 8;
#pragma unroll 2
    for (int k = 0; k < depth; k += 16, a_row += 16 * a_stride, b_row += 16 * b_stride) {
      uint32_t raw[4], high[4], low[4];
      arch::load_tiles_transposed(raw, arch::shared_address(a_row));
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // depth k ... k + 7, and k + 8 ... k + 15
        float2 w = *reinterpret_cast<const float2*>(weights + k + 8 * half + lane % 4 * 2);
        w = {scale * w.x, scale * w.y};
#pragma unroll
        for (int part = 2 * half; part < 2 * half + 2; ++part) {
          const float2 x = arch::unpack(raw[part], T{});
          split<T>({w.x * x.x, w.y * x.y}, high[part], low[part]);
        }
      }
#pragma unroll
      for (int n = 0; n < N / 16; ++n) {
        uint32_t right[4];
        arch::load_tiles_transposed(right, arch::shared_address(b_row + n * 16));
        auto* d = reinterpret_cast<float(*)[4]>(acc.x);
        arch::multiply_add(d[2 * n], high, right[0], right[1], T{});
        arch::multiply_add(d[2 * n + 1], high, right[2], right[3], T{});
        arch::multiply_add(d[2 * n], low, right[0], right[1], T{});
        arch::multiply_add(d[2 * n + 1], low, right[2], right[3], T{});
      }
    }
  } else {
    plain_product<Order::depth_first, Order::depth_first>(acc, a, a_stride, b, b_stride, depth,
                                                          [&](int k) { return scale * weights[k]; });
  }
}

// ---------------------------------------------------------------- shared-memory tiles

// A tile of Height rows of Width elements, rows padded.
template <class T, int Height, int Width>
struct SharedTile {
  static constexpr int stride = Width + Config<T>::pad;
  static constexpr int size = Height * stride;
};

// Starts the copy of rows [0, rows) and columns [col, col + Width) of a strided matrix with `cols` columns; zero
// outside. A thread keeps its columns and goes down the rows, so that an address costs an addition per piece.
// Recomputing addresses took more instructions than the products did (H200: half the time of stage outputs).
template <int Height, int Width, class T>
__device__ __forceinline__ void load_tile(T* shared, const T* matrix, std::int64_t stride, int rows, int col, int cols,
                                          bool wide) {
  constexpr int piece = 16 / sizeof(T);
  constexpr int pieces = Width / piece;
  constexpr int row_step = block_threads / pieces;
  constexpr int shared_stride = SharedTile<T, Height, Width>::stride;
  static_assert(block_threads % pieces == 0 && Height % row_step == 0);
  const int r = threadIdx.x / pieces, c = threadIdx.x % pieces * piece;
  const int valid = max(0, min(piece, cols - col - c));
  const int valid_rows = valid > 0 ? rows - r : 0;
  const T* from = matrix + r * stride + col + c;
  const std::int64_t step = row_step * stride;
  T* to = shared + r * shared_stride + c;
  if (wide) {
#pragma unroll
    for (int down = 0; down < Height; down += row_step, from += step) {
      // Nothing is read where nothing is valid.
      arch::copy_16(to + down * shared_stride, from, down < valid_rows ? valid * static_cast<int>(sizeof(T)) : 0);
    }
  } else {
#pragma unroll 1  // else 32 loads are under way together, and registers spill beside a state of 64
    for (int down = 0; down < Height; down += row_step, from += step) {
#pragma unroll
      for (int e = 0; e < piece; ++e)
        to[down * shared_stride + e] = down < valid_rows && e < valid ? from[e] : narrow<T>(0.0F);
    }
  }
}

}  // namespace tfla::cuda
