// Forward on Hopper: n of a warpgroup of the state, as it is handed over.
#pragma once

#include "cuda/sm90/common/state_tile.cuh"

namespace tfla::cuda::sm90::forward {

// Whole rows of n that a lane has after sum_rows, of so many panels of 64 rows.
template <int Panels>
inline constexpr int rows_of_lane = Panels > 1 ? Panels / 2 : 1;

// The four lanes of a quad hold shares of the sums of rows. They exchange them until each has one whole row, or with
// more of them one of every four; with fewer, two lanes have the same.
template <int Panels>
__device__ __forceinline__ void sum_rows(const float (&n)[Panels][2], float (&rows)[rows_of_lane<Panels>]) {
  const unsigned thread = threadIdx.x;
  const bool odd = (thread & 1) != 0, late = (thread & 2) != 0;
  const auto swap = [](float x, int with) { return __shfl_xor_sync(0xFFFFFFFFU, x, with); };
#pragma unroll
  for (int turn = 0; turn < rows_of_lane<Panels>; ++turn) {
    const float* early_panel = n[Panels > 1 ? 2 * turn : 0];
    const float* late_panel = n[Panels > 1 ? 2 * turn + 1 : 0];
    float both[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      both[h] = late ? late_panel[h] : early_panel[h];
      if (Panels > 1) both[h] += swap(late ? early_panel[h] : late_panel[h], 2);
    }
    rows[turn] = (odd ? both[1] : both[0]) + swap(odd ? both[0] : both[1], 1);
    if (Panels == 1) rows[turn] += swap(rows[turn], 2);
  }
}

// A number as three 16-bit terms that add up to it.
template <class T>
__device__ __forceinline__ int2 terms_of(float rest) {
  unsigned terms[3];
#pragma unroll
  for (unsigned& bits : terms) {
    bits = to_bits<T>(rest);
    rest -= from_bits<T>(static_cast<unsigned short>(bits));
  }
  return {static_cast<int>(terms[0] | terms[1] << 16), static_cast<int>(terms[2])};
}

}  // namespace tfla::cuda::sm90::forward
