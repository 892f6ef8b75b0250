// <C, dC> of every chunk and head by a kernel of its own, as launch_dstates has it, in a part for every 128 rows.
#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90 {

namespace {

constexpr int threads = 256, rows = 128;

__global__ void __launch_bounds__(threads) through_kernel(Call<float> call) {
  __shared__ double sums[threads / 32];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const std::int64_t index = blockIdx.x, unit = index / call.through_parts;
  const int part = static_cast<int>(index % call.through_parts);
  const std::int64_t number = unit / call.heads;
  const Chunk chunk = call.chunks[number];
  if (chunk.length == 0) return;
  const bool has_next =
      number + 1 < call.numbers && call.chunks[number + 1].first == chunk.first && call.chunks[number + 1].length > 0;
  const std::int64_t state = static_cast<std::int64_t>(call.dqk) * call.padded_dhv();
  const std::int64_t low = static_cast<std::int64_t>(part) * rows * call.padded_dhv();
  const std::int64_t high = min(low + static_cast<std::int64_t>(rows) * call.padded_dhv(), state);
  const auto* C = static_cast<const __nv_bfloat16*>(call.states) + unit * state;
  const auto* next = C + call.heads * state;
  const auto* dC = static_cast<const __nv_bfloat16*>(call.dstates) + unit * state;
  float own = 0, with_next = 0;
  for (std::int64_t e = low + threadIdx.x; e < high; e += threads) {
    const float d = __bfloat162float(dC[e]);
    own += d * __bfloat162float(C[e]);
    if (has_next) with_next += d * __bfloat162float(next[e]);
  }
  const double decay = call.gbar[unit];
  double product = has_next ? 0.5 * (decay * own + with_next) : decay * own;
  for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xFFFFFFFFU, product, offset);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = product;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < threads / 32; ++w) product += sums[w];
  call.through[index] = product;
}

}  // namespace

void launch_through(const Call<float>& call, cudaStream_t stream) {
  launch_chained("through", through_kernel, call.numbers * call.heads * call.through_parts, threads, 0, stream, call);
}

}  // namespace tfla::cuda::sm90
