// Products of a CTA of the delta rule, in the arithmetic of the call: float32, or float64 for float64 tensors.
//
//   sums[block,block] += A[block,depth] B[depth,block]     256 threads, per x per sums each
//
// Operands are functions of (row or column, depth), so that they come from anywhere, scaled on the way. They pass
// through a slab of shared memory.
#pragma once

#include "cuda/common/types.h"

namespace tfla::cuda::delta {

inline constexpr int threads = 256;
inline constexpr int side = 16;  // threads along either side of a product

template <class Real>
struct Block {
  static constexpr int size = sizeof(Real) == 4 ? 64 : 32;   // plan/operators/delta_cuda.h: delta_block
  static constexpr int per = size / side;                    // rows, and columns, of a thread: 16 bytes
  static constexpr int depth = sizeof(Real) == 4 ? 32 : 16;  // of a slab
  static constexpr int stride = size + per;                  // keeps rows on 16 bytes and off each other's banks
  static constexpr int pitch = size + 1;                     // rows of a square in shared memory
  static constexpr int square = size * pitch;
  static_assert(per * sizeof(Real) == 16);
};

// Two operands of a product, [depth][outer] each.
template <class Real>
struct alignas(16) Slab {
  Real a[Block<Real>::depth * Block<Real>::stride];
  Real b[Block<Real>::depth * Block<Real>::stride];
};

// Which index of an operand has neighbours in memory.
enum class Along { outer, depth };

template <class Real>
struct Sums {
  static constexpr int per = Block<Real>::per;
  Real x[per][per] = {};

  __device__ static int row_of(int i) { return static_cast<int>(threadIdx.x) / side * per + i; }
  __device__ static int col_of(int j) { return static_cast<int>(threadIdx.x) % side * per + j; }

  // f(i, row, col, value) for every element within rows and cols; i counts this thread's rows.
  template <class F>
  __device__ __forceinline__ void each(int rows, int cols, const F& f) const {
#pragma unroll
    for (int i = 0; i < per; ++i) {
#pragma unroll
      for (int j = 0; j < per; ++j) {
        if (row_of(i) < rows && col_of(j) < cols) f(i, row_of(i), col_of(j), x[i][j]);
      }
    }
  }
};

// Zeros beyond `outer` and `depth`.
template <Along along, class Real, class Load>
__device__ __forceinline__ void fill(Real* slab, int outer, int depth, const Load& load) {
  constexpr int size = Block<Real>::size, whole = Block<Real>::depth, stride = Block<Real>::stride;
  constexpr int lanes = along == Along::depth ? 8 : size;  // neighbouring threads along memory
  constexpr int others = threads / lanes;
  const int fast = static_cast<int>(threadIdx.x) % lanes, slow = static_cast<int>(threadIdx.x) / lanes;
  if constexpr (along == Along::depth) {
#pragma unroll
    for (int k = 0; k < whole; k += lanes) {
#pragma unroll
      for (int o = 0; o < size; o += others) {
        const bool inside = slow + o < outer && fast + k < depth;
        slab[(fast + k) * stride + slow + o] = inside ? load(slow + o, fast + k) : Real{0};
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < whole; k += others) {
      const bool inside = fast < outer && slow + k < depth;
      slab[(slow + k) * stride + fast] = inside ? load(fast, slow + k) : Real{0};
    }
  }
}

__device__ __forceinline__ void load_vector(const float* from, float (&to)[4]) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
__device__ __forceinline__ void load_vector(const double* from, double (&to)[2]) {
  const double2 x = *reinterpret_cast<const double2*>(from);
  to[0] = x.x, to[1] = x.y;
}

// sums += A B. a(row, k) and b(col, k). All threads of the CTA take part. It begins with a barrier, so that operands
// may be what other threads wrote just before; after its last barrier nobody reads them. Sums of a slab are added up,
// not single products: with long sums that saves a digit.
template <Along a_along, Along b_along, class Real, class A, class B>
__device__ __forceinline__ void multiply(Sums<Real>& sums, Slab<Real>& slab, int rows, int cols, int depth, const A& a,
                                         const B& b) {
  using Size = Block<Real>;
  constexpr int per = Size::per;
  for (int first = 0; first < depth; first += Size::depth) {
    __syncthreads();
    fill<a_along>(slab.a, rows, depth - first, [&](int row, int k) { return a(row, first + k); });
    fill<b_along>(slab.b, cols, depth - first, [&](int col, int k) { return b(col, first + k); });
    __syncthreads();
    Real part[per][per] = {};
#pragma unroll 8
    for (int k = 0; k < Size::depth; ++k) {
      Real left[per], right[per];
      load_vector(slab.a + k * Size::stride + Sums<Real>::row_of(0), left);
      load_vector(slab.b + k * Size::stride + Sums<Real>::col_of(0), right);
#pragma unroll
      for (int i = 0; i < per; ++i) {
#pragma unroll
        for (int j = 0; j < per; ++j) part[i][j] += left[i] * right[j];
      }
    }
#pragma unroll
    for (int i = 0; i < per; ++i) {
#pragma unroll
      for (int j = 0; j < per; ++j) sums.x[i][j] += part[i][j];
    }
  }
}

}  // namespace tfla::cuda::delta
