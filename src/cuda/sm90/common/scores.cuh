// Scores of a chunk with keys in rows, S^T or dP^T, and other sums of 64 rows in the registers of a warpgroup. Consumer
// W of a block has keys from 64 W on; no query before them sees them, so that consumer 1 has half the scores.
#pragma once

#include "cuda/arch/mma.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/common/device.cuh"
#include "cuda/sm90/common/chunks.cuh"
#include "cuda/sm90/common/scale16.cuh"

namespace tfla::cuda::sm90::scores {

using arch::Major;

// sum (+)= A B^T over a panel of 64: rows of both lie along the depth. There the distance of panels in a descriptor
// means nothing; two values of it keep the compiler from saving descriptors of B to use them for A much later, which
// spills.
template <class T, int R>
__device__ __forceinline__ void multiply_panel(float (&sum)[R], unsigned a, unsigned a_offset, unsigned b,
                                               unsigned b_offset, bool add) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    arch::multiply<T, Major::depth, Major::depth>(sum, arch::tile_at(a, a_offset + 32 * step, 0),
                                                  arch::tile_at(b, b_offset + 32 * step, 16), add || step > 0);
}

// Rows g and g + 8 of this thread times a number each.
template <int R>
__device__ __forceinline__ void scale_rows(float (&sum)[R], float2 by) {
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    sum[4 * n] *= by.x;
    sum[4 * n + 1] *= by.x;
    sum[4 * n + 2] *= by.y;
    sum[4 * n + 3] *= by.y;
  }
}

__device__ __forceinline__ float2 times(float2 x, float by) { return {x.x * by, x.y * by}; }
__device__ __forceinline__ float2 inverse_powers(float2 x) { return {inverse_power(x.x), inverse_power(x.y)}; }

// This thread's part of rows of Q or K, as it holds a sum of as many columns. row: see Lane.
template <int R>
__device__ __forceinline__ void load_rows(std::uint32_t (&rows)[R / 8][4], unsigned row) {
#pragma unroll
  for (int n = 0; n < R / 8; ++n) arch::load_tiles(rows[n], (row + n / 4 * slot_bytes) ^ (n % 4 << 5));
}

// Dot products of rows g and g + 8, in two chains each: the latency of one would show.
template <class T, int R>
__device__ __forceinline__ float2 row_dots(const float (&sum)[R], const std::uint32_t (&rows)[R / 8][4]) {
  float parts[4]{};
#pragma unroll
  for (int n = 0; n < R / 8; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float2 pair = arch::unpack(rows[n][x], T{});
      const int e = 8 * n + 2 * x;
      parts[x] = fmaf(pair.x, sum[e], fmaf(pair.y, sum[e + 1], parts[x]));
    }
  }
  float2 dots{parts[0] + parts[2], parts[1] + parts[3]};
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    dots.x += __shfl_xor_sync(0xFFFFFFFFU, dots.x, offset);
    dots.y += __shfl_xor_sync(0xFFFFFFFFU, dots.y, offset);
  }
  return dots;
}
template <class T, int R>
__device__ __forceinline__ float2 row_dots(const float (&sum)[R], unsigned row) {
  std::uint32_t rows[R / 8][4];
  load_rows<R>(rows, row);
  return row_dots<T>(sum, rows);
}

// Where a thread of consumer W works.
template <int W>
struct Lane {
  int row;               // its first key, and query; the other is 8 below
  int pair;              // its first column in every group of 8
  bool leads;            // it arrives at barriers for its warp
  bool leads_and_stays;  // the same, but where the store warp stands in for the first of consumer 0
  // Row that load_tiles and store_tiles take, in a half panel and in a panel, as swizzled: column group n lies at
  // address ^ (n << 5).
  unsigned half_row, panel_row;

  __device__ __forceinline__ Lane() {
    const unsigned thread = threadIdx.x % warpgroup;
    const unsigned lane = thread % 32, warp = thread / 32;
    row = static_cast<int>(W * half + warp * 16 + lane / 4);
    pair = static_cast<int>(lane % 4 * 2);
    leads = lane == 0;
    if constexpr (arch::for_racecheck) leads = true;
    leads_and_stays = leads && (W != 0 || warp != 0);
    half_row = (warp * 16 + lane % 16) * row_bytes + ((lane / 16 ^ lane % 8) << 4);
    panel_row = W * half_bytes + half_row;
  }
};

// Writes panels of 64 columns as 16-bit numbers for the store warp. lower: what rows are multiplied by (float16).
template <class T, int R>
__device__ __forceinline__ void stage(const float (&sum)[R], unsigned row, unsigned panel_bytes, unsigned staged,
                                      bool leads, float2 lower) {
#pragma unroll
  for (int n = 0; n < R / 8; ++n) {
    const auto pack = [&](int e) {
      const float by = e % 4 == 0 ? lower.x : lower.y;
      if constexpr (needs_scale16<T>) return arch::pack({sum[8 * n + e] * by, sum[8 * n + e + 1] * by}, T{});
      return arch::pack({sum[8 * n + e], sum[8 * n + e + 1]}, T{});
    };
    arch::store_tiles((row + n / 4 * panel_bytes) ^ (n % 4 << 5), pack(0), pack(2), pack(4), pack(6));
  }
  arch::writes_before_copies();
  __syncwarp();
  if (leads) arch::arrive(staged);
}

// P = S . D, or dS = dP . D, with keys in rows and queries in columns; D holds scale / den. Above the diagonal D may be
// infinite: those are set to zero, not multiplied. ahead: tokens from this thread's first query to its first key.
// visit(n, x0, x1, x2, x3): what comes of scores[4 n] and the three after it.
template <int R, class Visit>
__device__ __forceinline__ void each_gated(const float (&scores)[R], unsigned u, float2 c0, float2 c1, int ahead,
                                           const Visit& visit) {
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    const float4 pair = arch::read_float4(u + n * 64);
    const float2 u0{pair.x, pair.y}, u1{pair.z, pair.w};
    float x0 = scores[4 * n] * exp_sum(u0, c0), x1 = scores[4 * n + 1] * exp_sum(u1, c0);
    float x2 = scores[4 * n + 2] * exp_sum(u0, c1), x3 = scores[4 * n + 3] * exp_sum(u1, c1);
    if (n < half / 8) {  // the first 64 queries are the consumer's own
      x0 = ahead <= 8 * n ? x0 : 0;
      x1 = ahead <= 8 * n + 1 ? x1 : 0;
      x2 = ahead <= 8 * n - 8 ? x2 : 0;
      x3 = ahead <= 8 * n - 7 ? x3 : 0;
    }
    visit(n, x0, x1, x2, x3);
  }
}

// Rounded.
template <class T, int R>
__device__ __forceinline__ void gate(const float (&scores)[R], std::uint32_t (&gated)[R / 8][4], unsigned u, float2 c0,
                                     float2 c1, int ahead) {
  each_gated(scores, u, c0, c1, ahead, [&](int n, float x0, float x1, float x2, float x3) {
    gated[n / 2][n % 2 * 2] = arch::pack({x0, x1}, T{});
    gated[n / 2][n % 2 * 2 + 1] = arch::pack({x2, x3}, T{});
  });
}
// Where the scores were, to be rounded with a lift for every row.
template <int R>
__device__ __forceinline__ void gate_in_place(float (&scores)[R], unsigned u, float2 c0, float2 c1, int ahead) {
  each_gated(scores, u, c0, c1, ahead, [&](int n, float x0, float x1, float x2, float x3) {
    scores[4 * n] = x0;
    scores[4 * n + 1] = x1;
    scores[4 * n + 2] = x2;
    scores[4 * n + 3] = x3;
  });
}
// The largest. Scores with one lift for all threads are gated twice, the second time with the lift in c: kept until it
// is known they would not fit into the registers.
template <int R>
__device__ __forceinline__ float largest_gated(const float (&scores)[R], unsigned u, float2 c0, float2 c1, int ahead) {
  float first = 0, second = 0;
  each_gated(scores, u, c0, c1, ahead, [&](int /*n*/, float x0, float x1, float x2, float x3) {
    first = fmaxf(first, fmaxf(fabsf(x0), fabsf(x1)));
    second = fmaxf(second, fmaxf(fabsf(x2), fabsf(x3)));
  });
  return fmaxf(first, second);
}

template <class T>
__device__ __forceinline__ float2 lifted_gate(float2 c, float lift) {
  if constexpr (needs_scale16<T>) c.y += static_cast<float>(exponent_of(lift));
  return c;
}

// The same of all scores of consumer W. u, c: of all tokens, in shared memory. with(u, c0, c1, ahead) does it.
template <int W, class With>
__device__ __forceinline__ void with_gates(unsigned u, unsigned c, const With& with) {
  const Lane<W> my;
  const float2 c0 = arch::read_float2(c + my.row * 8), c1 = arch::read_float2(c + (my.row + 8) * 8);
  const int query = W * half + my.pair;
  with(u + query * 8, c0, c1, my.row - query);
}
template <class T, int W, int R>
__device__ __forceinline__ void gate_scores(const float (&scores)[R], std::uint32_t (&gated)[R / 8][4], unsigned u,
                                            unsigned c, float lift) {
  static_assert(R == (chunk - W * half) / 2);
  with_gates<W>(u, c, [&](unsigned from, float2 c0, float2 c1, int ahead) {
    gate<T>(scores, gated, from, lifted_gate<T>(c0, lift), lifted_gate<T>(c1, lift), ahead);
  });
}

__device__ __forceinline__ float scale16_of_scores(float largest) { return scale16_to(largest, top_of_scores, -60, 40); }

// P with a lift for every row: these are returned.
template <class T, int W, int R>
__device__ __forceinline__ float2 gate_rows(float (&scores)[R], std::uint32_t (&gated)[R / 8][4], unsigned u,
                                            unsigned c) {
  with_gates<W>(u, c,
                [&](unsigned from, float2 c0, float2 c1, int ahead) { gate_in_place(scores, from, c0, c1, ahead); });
  float2 largest{0, 0};
#pragma unroll
  for (int e = 0; e < R; e += 4)
    largest = {fmaxf(largest.x, fmaxf(fabsf(scores[e]), fabsf(scores[e + 1]))),
               fmaxf(largest.y, fmaxf(fabsf(scores[e + 2]), fabsf(scores[e + 3])))};
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2)  // over the four lanes that have a row
    largest = {fmaxf(largest.x, __shfl_xor_sync(0xFFFFFFFFU, largest.x, offset)),
               fmaxf(largest.y, __shfl_xor_sync(0xFFFFFFFFU, largest.y, offset))};
  const float2 lifts{scale16_of_scores(largest.x), scale16_of_scores(largest.y)};
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    gated[n / 2][n % 2 * 2] = arch::pack({scores[4 * n] * lifts.x, scores[4 * n + 1] * lifts.x}, T{});
    gated[n / 2][n % 2 * 2 + 1] = arch::pack({scores[4 * n + 2] * lifts.y, scores[4 * n + 3] * lifts.y}, T{});
  }
  return lifts;
}

// The lift that dS of all warps of both consumers has: dQ is a sum over keys and dK over queries. places, turn: see
// largest_of_warps.
template <int W, int R>
__device__ __forceinline__ float scale16_of_all(const float (&scores)[R], unsigned u, unsigned c, unsigned places,
                                             unsigned turn) {
  constexpr int warps = 2 * warpgroup / 32, barrier = 4;
  float own = 0;
  with_gates<W>(
      u, c, [&](unsigned from, float2 c0, float2 c1, int ahead) { own = largest_gated(scores, from, c0, c1, ahead); });
  const int warp = static_cast<int>(threadIdx.x - warpgroup) / 32;
  return scale16_of_scores(largest_of_warps<warps>(own, places, turn, warp, barrier));
}

// exp_sum of a vector at this thread's rows and a number of the tile: abar, or qbar scale / den.
template <int W>
__device__ __forceinline__ float2 row_weights(unsigned vector, unsigned number) {
  const unsigned row = vector + Lane<W>().row * 8;
  const float2 shift = arch::read_float2(number);
  return {exp_sum(arch::read_float2(row), shift), exp_sum(arch::read_float2(row + 64), shift)};
}

// Two rows of a vector in global memory. Nothing of the next head is written.
__device__ __forceinline__ void write_rows(float* to, int2 vectors, int row, float2 x) {
  if (threadIdx.x % 4 != 0) return;
  const int length = vectors.y % last_tile;
  if (row < length) to[vectors.x + row] = x.x;
  if (row + 8 < length) to[vectors.x + row + 8] = x.y;
}

}  // namespace tfla::cuda::sm90::scores
