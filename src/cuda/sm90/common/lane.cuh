// The place of a thread in a warpgroup.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/limits.h"

namespace tfla::cuda::sm90 {

// Where a thread of a warpgroup stands in a 64-row accumulator (arch/wgmma.cuh), and in tiles of 16-bit numbers. It
// holds rows `row` and `row` + 8, of every eight columns the two from `pair` on.
struct Lane {
  int warp, lane, row, pair;

  __device__ __forceinline__ Lane() : Lane(threadIdx.x) {}
  __device__ __forceinline__ explicit Lane(unsigned thread)
      : warp(static_cast<int>(thread % warpgroup_threads) / warp_threads),
        lane(static_cast<int>(thread % warp_threads)),
        row(16 * warp + lane / 4),
        pair(2 * (lane % 4)) {}
  // The same, computed anew where it is used, so that no registers keep it.
  __device__ __forceinline__ static Lane again() {
    int thread = threadIdx.x;
    arch::forget(thread);
    return Lane(thread);
  }

  // Whether this thread arrives at barriers for its warp.
  [[nodiscard]] __device__ __forceinline__ bool leads() const { return arch::arrives(lane == 0); }

  // The row that this lane names to ldmatrix and stmatrix for tile (n, n + 8 columns) of the warp's 16 rows, as an
  // address within a panel; xor with 32 n moves on by 16 n columns.
  [[nodiscard]] __device__ __forceinline__ unsigned tile_row() const {
    const int r = 16 * warp + lane % 16;
    return r * panel_row_bytes + ((lane / 16) ^ (lane % 8)) * 16;
  }
  // The same row in groups of eight columns (arch::groups_descriptor): two groups further on by 16 columns.
  [[nodiscard]] __device__ __forceinline__ unsigned group_row(int group_bytes) const {
    return (16 * warp + lane % 16) * 16 + lane / 16 * group_bytes;
  }
  // As tile_row, to read the transpose: 16 tokens by the warp's 16 columns of a panel.
  [[nodiscard]] __device__ __forceinline__ unsigned transposed_row() const {
    const int token = lane / 16 * 8 + lane % 8;
    return token * panel_row_bytes + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  }
};

}  // namespace tfla::cuda::sm90
