// Hopper's kernels of the delta rule, as host functions that launch one each: bfloat16, dqk to 128.
#pragma once

#include <cuda_runtime.h>

#include "cuda/delta/call.h"

namespace tfla::cuda::sm90 {

// The triangular system of every tile, and the vectors of its tokens, into scratch.solved.
void launch_delta_solve(const delta::Call<float>& call, cudaStream_t stream);
// H and the last state from them. columns: of a state that a CTA has, 64 or 128.
void launch_delta_forward(const delta::Call<float>& call, int columns, cudaStream_t stream);

}  // namespace tfla::cuda::sm90
