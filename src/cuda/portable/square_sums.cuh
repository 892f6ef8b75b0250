// Sums over the rows and columns of S . dS inside a chunk, for the gradients of the gates (docs/numerics.md).
//
// dlogf sums row - column, where large numbers cancel: a row whose denominator is small is a thousand times as large as
// others. q.dQ and k.dK of float32 sums are each off by their own rounding, which stays. So float32 and float64 take
// both sums from the same products S dS: dQ and dK make them of the same tiles in the same order, to the last bit, and
// nothing is lost on the way.
#pragma once

#include "cuda/portable/products.cuh"

namespace tfla::cuda {

// A sum and what rounding took from it. No double: most GPUs have little arithmetic for those.
template <class Real>
struct LongSum {
  Real sum = 0, rest = 0;

  __device__ __forceinline__ void add(Real x) {
    const Real next = sum + x, added = next - sum;
    rest += (sum - (next - added)) + (x - added);
    sum = next;
  }
  __device__ __forceinline__ void add(const LongSum& x) {
    add(x.sum);
    rest += x.rest;
  }
  // Over lanes whose numbers differ in the bits from First up to Last.
  template <int First, int Last>
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int offset = First; offset < Last; offset *= 2)
      add({__shfl_xor_sync(0xFFFFFFFFU, sum, offset), __shfl_xor_sync(0xFFFFFFFFU, rest, offset)});
  }
  __device__ __forceinline__ void store(Real* to, std::int64_t second) const {
    to[0] = sum;
    to[second] = isfinite(sum) ? rest : Real{0};
  }
};

// One rounding, always: as a part of a multiply-add the product would have digits that the other side's has not.
__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double rounded_product(double x, double y) { return __dmul_rn(x, y); }

// add(r, c, S dS) for this thread's elements: S in registers, dS in shared memory, where this thread wrote it.
template <class T, class Add>
__device__ __forceinline__ void each_product(Accumulator<T, tile_rows>& S, const Workspace<T>& space, const Add& add) {
  S.each([&](int r, int row, int c, int col, T& value) {
    add(r, c, rounded_product(value, space.p[row * Workspace<T>::p_stride + col]));
  });
}

template <class T>
class RowSums {
  using Square = Accumulator<T, tile_rows>;
  LongSum<T> of_[Square::rows];

  __device__ static bool first_in_row() { return threadIdx.x % Square::lanes == 0; }

 public:
  // x: the same in all threads of the row.
  __device__ __forceinline__ void add_to_row(int r, T x) {
    if (first_in_row()) of_[r].add(x);
  }
  __device__ __forceinline__ void add(Square& S, const Workspace<T>& space) {
    each_product<T>(S, space, [&](int r, int, T product) { of_[r].add(product); });
  }
  // Rows [0, count) into sums, and what rounding took `second` further on.
  __device__ __forceinline__ void store(int count, T* sums, std::int64_t second) {
#pragma unroll
    for (int r = 0; r < Square::rows; ++r) {
      of_[r].template add_lanes<1, Square::lanes>();
      if (Square::row_of(r) < count && first_in_row()) of_[r].store(sums + Square::row_of(r), second);
    }
  }
};

template <class T>
class ColumnSums {
  using Square = Accumulator<T, tile_rows>;
  LongSum<T> of_[Square::cols];

 public:
  __device__ __forceinline__ void add(Square& S, const Workspace<T>& space) {
    each_product<T>(S, space, [&](int, int c, T product) { of_[c].add(product); });
  }
  // Columns [0, count), and `more`, which this CTA wrote. Uses P.
  __device__ __forceinline__ void store(int count, const T* more, T* sums, std::int64_t second,
                                        const Workspace<T>& space) {
    static_assert(block_warps * tile_rows * sizeof(LongSum<T>) <= Workspace<T>::p_size * sizeof(T));
    auto* parts = reinterpret_cast<LongSum<T>*>(space.p);  // [warps,64]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // nobody multiplies by P any more
#pragma unroll
    for (int c = 0; c < Square::cols; ++c) {
      of_[c].template add_lanes<Square::lanes, 32>();
      if (lane < Square::lanes) parts[warp * tile_rows + Square::col_of(c)] = of_[c];
    }
    __syncthreads();
    const int column = threadIdx.x;
    if (column >= count) return;
    LongSum<T> total{more[column]};
    for (int part = 0; part < block_warps; ++part) total.add(parts[part * tile_rows + column]);
    total.store(sums + column, second);
  }
};

}  // namespace tfla::cuda
