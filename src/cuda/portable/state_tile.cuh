// A tile of C or dC in registers: its scale in float16, its way to the states of chunks, and products with them.
#pragma once

#include "cuda/portable/block_gemm.cuh"

namespace tfla::cuda {

// A power of two that brings the largest weight of a slab near 1, for float16, which has no room for others. The state
// is scaled by it while the slab is added.
template <class T>
__device__ __forceinline__ typename Config<T>::Real slab_scale(const typename Config<T>::Real* weights) {
  if constexpr (std::is_same_v<T, __half>) {
    float largest = 0;
    for (int t = 0; t < Config<T>::slab; ++t) largest = fmaxf(largest, fabsf(weights[t]));
    if (largest > 0 && isfinite(largest) && (largest < 0x1p-6F || largest > 4))
      return exp2f(fminf(fmaxf(-ceilf(log2f(largest)), -60.0F), 60.0F));
  }
  return 1;
}

// Stores a tile of C, rounded to the stored type, at its place in a chunk's state; neighbours in one store.
template <class T, int N>
__device__ __forceinline__ void store_chunk_state(Accumulator<T, N>& C, typename Config<T>::Stored* stored, int row,
                                                  int rows, int col, int cols) {
  using Sums = Accumulator<T, N>;
  using Stored = typename Config<T>::Stored;
  constexpr int step = is_16_bit<T> ? 2 : 1;
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) {
    const int i = row + Sums::row_of(r);
    if (i >= rows) continue;
    Stored* line = stored + static_cast<std::int64_t>(i) * cols;
#pragma unroll
    for (int c = 0; c < Sums::cols; c += step) {
      const int j = col + Sums::col_of(c);
      if (j >= cols) continue;
      if constexpr (step == 2) {
        const Stored pair[2] = {narrow<Stored>(C.at(r, c)), narrow<Stored>(C.at(r, c + 1))};
        *reinterpret_cast<uint32_t*>(line + j) = *reinterpret_cast<const uint32_t*>(pair);
      } else {
        line[j] = narrow<Stored>(C.at(r, c));
      }
    }
  }
}

// This warp's share of <C, dC> in a tile of dC, plus that of `share`. C is the one stored at the chunk's start.
template <class T, int N>
__device__ __forceinline__ double state_product(Accumulator<T, N>& dC, const typename Config<T>::Stored* stored,
                                                int row, int rows, int col, int cols, double share) {
  using Sums = Accumulator<T, N>;
  using Stored = typename Config<T>::Stored;
  using Wide = typename Config<T>::Norm;
  Wide sum = 0;
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) {
    const int i = row + Sums::row_of(r);
    if (i >= rows) continue;
    const Stored* line = stored + static_cast<std::int64_t>(i) * cols;
#pragma unroll
    for (int c = 0; c < Sums::cols; c += is_16_bit<T> ? 2 : 1) {
      const int j = col + Sums::col_of(c);
      if (j >= cols) continue;
      if constexpr (is_16_bit<T>) {
        const float2 pair = arch::unpack(*reinterpret_cast<const uint32_t*>(line + j), Stored{});
        sum += dC.at(r, c) * pair.x + dC.at(r, c + 1) * pair.y;
      } else {
        sum += static_cast<Wide>(dC.at(r, c)) * static_cast<Wide>(line[j]);
      }
    }
  }
  double total = share + static_cast<double>(sum);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xFFFFFFFFU, total, offset);
  return total;
}

}  // namespace tfla::cuda
