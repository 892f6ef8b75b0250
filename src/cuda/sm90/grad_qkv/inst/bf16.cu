// Stage `gradients` on Hopper: dQ, dK, dV of a chunk of 128 tokens and one head, one such tile after the other on every
// multiprocessor. Heads too wide for that are left to `values` and `keys`. See docs/hopper.md.
//
// V, C and dC stream through a ring in panels of 64 columns, only Q, K and dH stay for the whole tile. Two consumer
// warpgroups own 64 keys (for dK, dV) and 64 queries (for dQ) each. Scores are computed with keys in rows, so that P
// and dS are register operands for dV and dK; dS goes through shared memory once, for dQ.
//
// In float16 every row of P has a lift (lift.cuh), and dS of a tile has one.
#include <algorithm>
#include <limits>

#include "cuda/sm90/grad_qkv/kernel.cuh"

namespace tfla::cuda::sm90 {

using gradients::chunk, gradients::widest_dhv, gradients::widest_dqk;

bool takes_grad_qkv(const Call<float>& call) {
  constexpr std::int64_t most = std::numeric_limits<int>::max();
  constexpr std::int64_t most_tiles = most / 32;  // the items of the ring are counted over all of them
  // At least as many as wide heads have.
  const std::int64_t parts = (std::max(call.dims.dqk, call.dims.dhv) + widest_dqk - 1) / widest_dqk;
  return call.dims.L == chunk && call.dims.group == 1 && call.rules.scale > 0 &&
         call.dims.all_tokens() * call.dims.heads * parts <= most &&
         call.dims.chunk_count * call.dims.heads * parts <= most_tiles;
}

bool splits_grad_qkv(std::int64_t dqk, std::int64_t dhv) { return dqk > widest_dqk || dhv > widest_dhv; }

template void launch_grad_qkv<__nv_bfloat16>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
