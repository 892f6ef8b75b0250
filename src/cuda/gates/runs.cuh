// Where runs of packed sequences begin, and at which tokens sequences do.
#pragma once

#include "cuda/common/runs.cuh"

namespace tfla::cuda::gates {

template <class Real>
__device__ __forceinline__ std::int64_t merged_start(const Call<Real>& call, std::int64_t sequence) {
  return read_boundary(call.runs.cu_seqlens, sequence * call.runs.cu_stride, call.runs.cu_is_64_bit, call.dims.tokens);
}

// The first sequence that begins at a token or after it; their number if none does.
template <class Real>
__device__ __forceinline__ std::int64_t first_sequence_from(const Call<Real>& call, std::int64_t token) {
  std::int64_t low = 0, high = call.runs.sequences;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (merged_start(call, middle) < token)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// A run has the sequences that begin in its window of tokens. A thread takes a token, and the first ones a run too:
// there are at most as many searches as tokens, of few steps each, whatever the boundaries are.
template <class Real>
__global__ void runs_kernel(Call<Real> call) {
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const std::int64_t x = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, runs = call.dims.sequences;
  if (x <= runs) {
    const std::int64_t first = x == 0      ? 0
                               : x == runs ? call.runs.sequences
                                           : first_sequence_from(call, x * call.runs.window);
    call.runs.starts[x] = merged_start(call, first);
  }
  bool begins = false;
  if (x < call.dims.tokens) {
    const std::int64_t sequence = first_sequence_from(call, x);
    begins = sequence < call.runs.sequences && merged_start(call, sequence) == x;
  }
  const unsigned bits = __ballot_sync(0xFFFFFFFFU, begins);
  if (threadIdx.x % warp_size == 0 && x / warp_size <= call.dims.tokens / warp_size + 1)
    call.runs.first_tokens[x / warp_size] = bits;
}

}  // namespace tfla::cuda::gates
