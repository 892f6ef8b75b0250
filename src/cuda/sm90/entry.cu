#include "cuda/sm90/entry.h"

#include <algorithm>
#include <limits>

#include "cuda/sm90/grad_qk/config.h"
#include "cuda/sm90/grad_qkv/config.h"

namespace tfla::cuda::sm90 {

bool takes_grad_qkv(const Call<float>& call) {
  constexpr std::int64_t most = std::numeric_limits<int>::max();
  constexpr std::int64_t most_tiles = most / 32;  // the items of the ring are counted over all of them
  // At least as many column tiles as grad_v and grad_qk have of a chunk.
  const std::int64_t tiles =
      (std::max(call.dims.dqk, call.dims.dhv) + grad_qk::tile_columns - 1) / grad_qk::tile_columns;
  return call.dims.L == chunk_tokens && call.dims.group == 1 && call.rules.scale > 0 &&
         call.dims.all_tokens() * call.dims.heads * tiles <= most &&
         call.dims.chunk_count * call.dims.heads * tiles <= most_tiles;
}

bool splits_grad_qkv(std::int64_t dqk, std::int64_t dhv) {
  return dqk > grad_qkv::largest_dqk || dhv > grad_qkv::largest_dhv;
}

GradKernels choose(bool float16, std::int64_t dqk, std::int64_t dhv) {
  if (!float16 && dqk <= panel && dhv <= panel) return GradKernels::grad_qkv_small;
  return splits_grad_qkv(dqk, dhv) ? GradKernels::grad_v_and_grad_qk : GradKernels::grad_qkv;
}

int trace_parts(int dqk) { return (dqk + grad_qk::tile_columns - 1) / grad_qk::tile_columns * grad_qk::trace_warps; }

}  // namespace tfla::cuda::sm90
