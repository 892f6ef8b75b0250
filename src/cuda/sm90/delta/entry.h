// Hopper's kernels of the delta rule, as host functions that launch one each: bfloat16, dqk to 128.
#pragma once

#include <cuda_runtime.h>

#include "cuda/delta/call.h"

namespace tfla::cuda::sm90 {

// The triangular system of every tile, and the vectors of its tokens, into scratch.solved.
void launch_delta_solve(const delta::Call<float>& call, cudaStream_t stream);
// From them, with columns of a state to each CTA as the plan says: H and the last state; residuals, and C at the starts
// of tiles; dX and dV, and dC at the ends of tiles.
void launch_delta_forward(const delta::Call<float>& call, cudaStream_t stream);
void launch_delta_states(const delta::Call<float>& call, cudaStream_t stream);
void launch_delta_grad_states(const delta::Call<float>& call, cudaStream_t stream);

}  // namespace tfla::cuda::sm90
