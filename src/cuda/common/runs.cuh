// Runs: neighbouring short sequences that kernels take for one. What a sequence leaves must not reach the next one of
// its run, so the gates are reset at its first token.
//
// A reset comes before the first token's own gates. It adds reset_log_forget to the sum of log f, which makes every
// product across it exactly zero, and begins the max state anew at 0. In a sum of log f the resets of a chunk cancel
// between any two tokens of a sequence. In MaxMap's words (gates/scan.cuh) a reset is {-S, S}: m becomes
// -S + max(m, S) = 0, for any m below S.
#pragma once

#include "cuda/common/device.cuh"

namespace tfla::cuda {

// Bits of up to 32 tokens, from token t of a chunk on: whether a sequence begins there. None beyond the chunk.
template <class Real>
__device__ __forceinline__ unsigned first_tokens(const Call<Real>& call, const Chunk& chunk, int t) {
  if (call.runs.first_tokens == nullptr || t >= chunk.length) return 0;
  const std::int64_t token = chunk.packed + t;
  const std::uint32_t* words = call.runs.first_tokens + token / 32;
  const unsigned bits = __funnelshift_r(words[0], words[1], static_cast<unsigned>(token % 32));
  const int left = chunk.length - t;
  return left < 32 ? bits & ((1U << left) - 1) : bits;
}

// The same of resets. The first token of a run needs none: there is nothing before it.
template <class Real>
__device__ __forceinline__ unsigned resets(const Call<Real>& call, const Chunk& chunk, std::int64_t number, int t) {
  const unsigned bits = first_tokens(call, chunk, t);
  return t == 0 && number == chunk.first ? bits & ~1U : bits;
}

}  // namespace tfla::cuda
