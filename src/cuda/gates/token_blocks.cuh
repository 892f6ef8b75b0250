// The vectors of token blocks, half a chunk each, that grad_states_v reads (sm90/forward/inst/grad_states_v.cu).
#pragma once

#include "cuda/gates/vectors.cuh"

namespace tfla::cuda::gates {

static_assert(slab_tokens == 2 * token_block, "a chunk has two token blocks, in one slab");

// The boundary between the two token blocks of a chunk, or the end of a chunk that has only one: the sum of log f up to
// there, and the max state, in whose scale nothing is stored. All lanes of a warp take part.
struct Middle {
  double b, m;
};
template <class Real>
__device__ __forceinline__ Middle middle_of(const Call<Real>& call, int length, const ChunkEnds& ends,
                                            const LaneScan& scan) {
  constexpr int last_lane = token_block / lane_tokens - 1;  // of the first token block
  const double b = __shfl_sync(0xFFFFFFFFU, scan.b[lane_tokens - 1], last_lane);
  const double top = __shfl_sync(0xFFFFFFFFU, scan.top[lane_tokens - 1], last_lane);
  if (length <= token_block) return {ends.b_last, ends.m_end};
  return {b, call.rules.family.has_max_state ? b + fmax(ends.m_start, top) : 0.0};
}

// The number of a chunk's first token block. Token blocks are numbered as chunks of their size would be.
template <class Real>
__device__ std::int64_t block_number(const Call<Real>& call, const Chunk& chunk, std::int64_t number) {
  const std::int64_t before = number - chunk.first;  // chunks before this one in its sequence
  const std::int64_t first = call.packing.cu_seqlens == nullptr
                                 ? chunk.sequence * ((call.dims.tokens + token_block - 1) / token_block)
                                 : (chunk.packed - before * call.dims.L) / token_block + chunk.sequence;
  return first + 2 * before;
}

// Writes the vectors of a lane's tokens, from token t of a chunk on; they begin at `at`.
template <class Scan>
__device__ __forceinline__ void write_block_vectors(const Scan& scan, const Chunk& chunk, std::int64_t at, int t,
                                                    const ChunkEnds& ends, const LaneScan& own) {
  const Call<float>& call = scan.call;
  const Middle middle = middle_of(call, chunk.length, ends, own);
  const int tokens = chunk.length - t;
  if (tokens <= 0) return;
  const bool whole = tokens >= lane_tokens && at % lane_tokens == 0, later = t >= token_block;
  const auto write = [&](auto* to, const auto& value_of) { write_tokens(to + at, tokens, whole, value_of); };
  double u[lane_tokens];
  float row[lane_tokens];  // scale / den
#pragma unroll
  for (int x = 0; x < lane_tokens; ++x) {
    u[x] = call.rules.family.has_max_state ? -fmax(ends.m_start, own.top[x]) : own.b[x];
    row[x] = static_cast<float>(call.rules.scale) * call.gates.inverse[at + min(x, tokens - 1)];
  }
  write(call.gates.block_u, [&](int x) {
    float2 exponent;
    as_exponent(u[x], exponent);
    exponent.y += log2f(row[x]);
    return exponent;
  });
  // Exponents from the start of the token's block, and to its end.
  const double from = later ? middle.m - middle.b : ends.m_start;
  const double to = later ? ends.b_last - ends.m_end : middle.b - middle.m;
  write(call.gates.block_qbar, [&](int x) { return row[x] * exponential(u[x] + from, 0.0F); });
  write(call.gates.block_abar, [&](int x) { return exponential(own.c[x] + to, 0.0F); });
  if (t % token_block > 0) return;
  const std::int64_t block = block_number(call, chunk, scan.number) + (later ? 1 : 0);
  call.gates.block_gbar[block * call.dims.heads + scan.head] = exponential(from + to, 0.0F);
}

}  // namespace tfla::cuda::gates
