// Products of a chunk with keys in rows: scores S^T or their gradients dP^T, and other accumulators of 64 rows. Math
// warpgroup W owns the keys, and the queries, of token block W of the chunk. Queries of block 0 do not see keys of
// block 1, so that math warpgroup 1 has half the scores.
#pragma once

#include "cuda/arch/mma.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/common/device.cuh"
#include "cuda/sm90/common/gates.cuh"
#include "cuda/sm90/common/lane.cuh"
#include "cuda/sm90/common/scale16.cuh"

namespace tfla::cuda::sm90::grad {

using arch::Major;

// Where a thread of math warpgroup W works: in accumulators of its token block, and in vectors and panels of the chunk.
template <int W>
struct ChunkLane {
  int row;     // its first key, and query; the other is 8 below
  int pair;    // its first column in every group of 8
  bool leads;  // it arrives at barriers for its warp
  // The same at a barrier of a slot that a result leaves through: there the store warp arrives in the place of the
  // first warp of math warpgroup 0, when the result has been read.
  bool leads_but_first;
  unsigned panel_row, chunk_panel_row;  // Lane::tile_row in a panel, and in a chunk panel

  // As Lane, in unsigned numbers, with which the compiler takes fewer instructions for sums of addresses here.
  __device__ __forceinline__ ChunkLane() {
    const unsigned thread = threadIdx.x % warpgroup_threads;
    const unsigned lane = thread % warp_threads, warp = thread / warp_threads;
    row = static_cast<int>(W * token_block + warp * 16 + lane / 4);
    pair = static_cast<int>(lane % 4 * 2);
    leads = lane == 0;
    if constexpr (arch::for_racecheck) leads = true;
    leads_but_first = leads && (W != 0 || warp != 0);
    panel_row = (warp * 16 + lane % 16) * panel_row_bytes + ((lane / 16 ^ lane % 8) << 4);
    chunk_panel_row = W * panel_bytes + panel_row;
  }
};

// Bytes between operands of two steps of a product along rows: 16 of them.
inline constexpr unsigned step_rows_bytes = 16 * panel_row_bytes;

// sum (+)= A B^T over a panel of 64 columns: rows of both lie along the depth. There the distance of panels in a
// descriptor means nothing; two values of it keep the compiler from saving descriptors of B to use them for A much
// later, which spills.
template <class T, int R>
__device__ __forceinline__ void multiply_panel(float (&sum)[R], unsigned a, unsigned a_offset, unsigned b,
                                               unsigned b_offset, bool add) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    arch::multiply<T, Major::depth, Major::depth>(sum, arch::tile_at(a, a_offset + 32 * step, 0),
                                                  arch::tile_at(b, b_offset + 32 * step, 16), add || step > 0);
}

// This thread's rows times a number each.
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
__device__ __forceinline__ float2 times(float2 x, float2 by) { return {x.x * by.x, x.y * by.y}; }
__device__ __forceinline__ float2 inverse_powers(float2 x) { return {inverse_power(x.x), inverse_power(x.y)}; }

// This thread's numbers of rows of Q or K, in the order of an accumulator of as many columns. row: see ChunkLane.
template <int R>
__device__ __forceinline__ void load_rows(std::uint32_t (&rows)[R / 8][4], unsigned row) {
#pragma unroll
  for (int n = 0; n < R / 8; ++n) arch::load_tiles(rows[n], (row + n / 4 * chunk_panel_bytes) ^ (n % 4 << 5));
}

// Dot products of this thread's two rows, in two chains each: the latency of one would show.
template <class T, int R>
__device__ __forceinline__ float2 row_dots(const float (&sum)[R], const std::uint32_t (&rows)[R / 8][4]) {
  float chains[4]{};
#pragma unroll
  for (int n = 0; n < R / 8; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float2 pair = arch::unpack(rows[n][x], T{});
      const int e = 8 * n + 2 * x;
      chains[x] = fmaf(pair.x, sum[e], fmaf(pair.y, sum[e + 1], chains[x]));
    }
  }
  float2 dots{chains[0] + chains[2], chains[1] + chains[3]};
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

// Writes panels of 64 columns as 16-bit numbers for the store warp. inverse_scales: float16: factors of the two rows.
template <class T, int R>
__device__ __forceinline__ void stage(const float (&sum)[R], unsigned row, unsigned panel_distance, unsigned staged,
                                      bool leads, float2 inverse_scales) {
#pragma unroll
  for (int n = 0; n < R / 8; ++n) {
    const auto pack = [&](int e) {
      const float by = e % 4 == 0 ? inverse_scales.x : inverse_scales.y;
      if constexpr (needs_scale16<T>) return arch::pack({sum[8 * n + e] * by, sum[8 * n + e + 1] * by}, T{});
      return arch::pack({sum[8 * n + e], sum[8 * n + e + 1]}, T{});
    };
    arch::store_tiles((row + n / 4 * panel_distance) ^ (n % 4 << 5), pack(0), pack(2), pack(4), pack(6));
  }
  arch::writes_before_copies();
  __syncwarp();
  if (leads) arch::arrive(staged);
}

// P = S . D, or dS = dP . D, with keys in rows and queries in columns; D holds scale / den. Above the diagonal D may be
// infinite: those scores are set to zero, not multiplied. ahead: tokens from this thread's first query to its first
// key. visit(n, x0, x1, x2, x3): with the gated scores[4 n] to scores[4 n + 3].
template <int R, class Visit>
__device__ __forceinline__ void each_gated(const float (&scores)[R], unsigned u, float2 c0, float2 c1, int ahead,
                                           const Visit& visit) {
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    const float4 pair = arch::read_float4(u + n * 64);
    const float2 u0{pair.x, pair.y}, u1{pair.z, pair.w};
    float x0 = scores[4 * n] * exp_sum(u0, c0), x1 = scores[4 * n + 1] * exp_sum(u1, c0);
    float x2 = scores[4 * n + 2] * exp_sum(u0, c1), x3 = scores[4 * n + 3] * exp_sum(u1, c1);
    if (n < token_block / 8) {  // the first 64 queries are of the same token block as the keys
      x0 = ahead <= 8 * n ? x0 : 0;
      x1 = ahead <= 8 * n + 1 ? x1 : 0;
      x2 = ahead <= 8 * n - 8 ? x2 : 0;
      x3 = ahead <= 8 * n - 7 ? x3 : 0;
    }
    visit(n, x0, x1, x2, x3);
  }
}

// Gated scores as operands.
template <class T, int R>
__device__ __forceinline__ void gate(const float (&scores)[R], std::uint32_t (&gated)[R / 8][4], unsigned u, float2 c0,
                                     float2 c1, int ahead) {
  each_gated(scores, u, c0, c1, ahead, [&](int n, float x0, float x1, float x2, float x3) {
    gated[n / 2][n % 2 * 2] = arch::pack({x0, x1}, T{});
    gated[n / 2][n % 2 * 2 + 1] = arch::pack({x2, x3}, T{});
  });
}
// Gated scores in the place of the scores.
template <int R>
__device__ __forceinline__ void gate_in_place(float (&scores)[R], unsigned u, float2 c0, float2 c1, int ahead) {
  each_gated(scores, u, c0, c1, ahead, [&](int n, float x0, float x1, float x2, float x3) {
    scores[4 * n] = x0;
    scores[4 * n + 1] = x1;
    scores[4 * n + 2] = x2;
    scores[4 * n + 3] = x3;
  });
}
// The largest gated score. Scores with one scale16 for all threads are gated twice, the second time with the scale in
// c: gated scores that wait for the scale would not fit into the registers beside the scores.
template <int R>
__device__ __forceinline__ float largest_gated(const float (&scores)[R], unsigned u, float2 c0, float2 c1, int ahead) {
  float first = 0, second = 0;
  each_gated(scores, u, c0, c1, ahead, [&](int /*n*/, float x0, float x1, float x2, float x3) {
    first = fmaxf(first, fmaxf(fabsf(x0), fabsf(x1)));
    second = fmaxf(second, fmaxf(fabsf(x2), fabsf(x3)));
  });
  return fmaxf(first, second);
}

// c of this thread's two keys, with the scale16 of the scores in it.
template <class T>
__device__ __forceinline__ float2 scaled_gate(float2 c, float scale) {
  if constexpr (needs_scale16<T>) c.y += static_cast<float>(exponent_of(scale));
  return c;
}

// Scores of 64 queries and the keys of math warpgroup W, as operands. query: this thread's first one.
template <class T, class Gates, int W>
__device__ __forceinline__ void gate_block(const float (&scores)[token_block / 2],
                                           std::uint32_t (&gated)[token_block / 16][4], unsigned memory, int query,
                                           int ahead, float scale) {
  const unsigned c = memory + Gates::c + ChunkLane<W>().row * 8;
  const float2 c0 = arch::read_float2(c), c1 = arch::read_float2(c + 64);
  gate<T>(scores, gated, memory + Gates::u + query * 8, scaled_gate<T>(c0, scale), scaled_gate<T>(c1, scale), ahead);
}

// Calls with(u, c0, c1, ahead) for all scores of math warpgroup W.
template <class Gates, int W, class With>
__device__ __forceinline__ void with_gates(unsigned memory, const With& with) {
  const ChunkLane<W> my;
  const unsigned c = memory + Gates::c;
  const float2 c0 = arch::read_float2(c + my.row * 8), c1 = arch::read_float2(c + (my.row + 8) * 8);
  const int query = W * token_block + my.pair;
  with(memory + Gates::u + query * 8, c0, c1, my.row - query);
}
template <class T, class Gates, int W, int R>
__device__ __forceinline__ void gate_scores(const float (&scores)[R], std::uint32_t (&gated)[R / 8][4], unsigned memory,
                                            float scale) {
  static_assert(R == (chunk_tokens - W * token_block) / 2);
  with_gates<Gates, W>(memory, [&](unsigned u, float2 c0, float2 c1, int ahead) {
    gate<T>(scores, gated, u, scaled_gate<T>(c0, scale), scaled_gate<T>(c1, scale), ahead);
  });
}

__device__ __forceinline__ float scale16_of_scores(float largest) {
  return scale16_to(largest, top_of_scores, -60, 40);
}

// The same with a scale16 for each row. Returns those of this thread's rows.
template <class T, class Gates, int W, int R>
__device__ __forceinline__ float2 gate_and_scale_rows(float (&scores)[R], std::uint32_t (&gated)[R / 8][4],
                                                      unsigned memory) {
  with_gates<Gates, W>(memory,
                       [&](unsigned u, float2 c0, float2 c1, int ahead) { gate_in_place(scores, u, c0, c1, ahead); });
  float2 largest{0, 0};
#pragma unroll
  for (int e = 0; e < R; e += 4)
    largest = {fmaxf(largest.x, fmaxf(fabsf(scores[e]), fabsf(scores[e + 1]))),
               fmaxf(largest.y, fmaxf(fabsf(scores[e + 2]), fabsf(scores[e + 3])))};
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2)  // over the four lanes that have a row
    largest = {fmaxf(largest.x, __shfl_xor_sync(0xFFFFFFFFU, largest.x, offset)),
               fmaxf(largest.y, __shfl_xor_sync(0xFFFFFFFFU, largest.y, offset))};
  const float2 scales{scale16_of_scores(largest.x), scale16_of_scores(largest.y)};
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    gated[n / 2][n % 2 * 2] = arch::pack({scores[4 * n] * scales.x, scores[4 * n + 1] * scales.x}, T{});
    gated[n / 2][n % 2 * 2 + 1] = arch::pack({scores[4 * n + 2] * scales.y, scores[4 * n + 3] * scales.y}, T{});
  }
  return scales;
}

// The one scale16 of dS of both math warpgroups: dQ is a sum over keys and dK over queries. places, turn, barrier: see
// largest_of_warps.
template <class Gates, int W, int R>
__device__ __forceinline__ float scale16_of_all(const float (&scores)[R], unsigned memory, unsigned places,
                                                unsigned turn, int barrier) {
  constexpr int warps = 2 * warpgroup_warps;
  float own = 0;
  with_gates<Gates, W>(
      memory, [&](unsigned u, float2 c0, float2 c1, int ahead) { own = largest_gated(scores, u, c0, c1, ahead); });
  const int warp = static_cast<int>(threadIdx.x - warpgroup_threads) / warp_threads;
  return scale16_of_scores(largest_of_warps<warps>(own, places, turn, warp, barrier));
}

// exp_sum of a vector at this thread's rows and of a number of the tile.
template <int W>
__device__ __forceinline__ float2 row_weights(unsigned vector, unsigned number) {
  const unsigned row = vector + ChunkLane<W>().row * 8;
  const float2 shift = arch::read_float2(number);
  return {exp_sum(arch::read_float2(row), shift), exp_sum(arch::read_float2(row + 64), shift)};
}
// abar of this thread's keys, and qbar of its queries times scale / den.
template <class Gates, int W>
__device__ __forceinline__ float2 abar(unsigned memory) {
  return row_weights<W>(memory + Gates::c, memory + Gates::outflow);
}
template <class Gates, int W>
__device__ __forceinline__ float2 qbar(unsigned memory) {
  return row_weights<W>(memory + Gates::u, memory + Gates::inflow);
}

}  // namespace tfla::cuda::sm90::grad
