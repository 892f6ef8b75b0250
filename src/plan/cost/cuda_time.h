// The paper's runtime model with the constants of the portable CUDA kernels. They walk through a chunk in squares of 64
// x 64 tokens and leave out those above the diagonal, so products grow with the chunk, and do so once more for every
// part of a wide head; states are stored once per chunk, so their traffic falls with it. Kernels for Hopper rebuild
// states on the chip and are not described by this.
#pragma once

#include <cstdint>

#include "tfla/analysis.h"
#include "tfla/tensor_view.h"

namespace tfla {

enum class CudaWork : std::uint8_t { forward, training };

// Seconds on a full GPU, per head and chunk of x tokens. float64 costs a multiple of float32 throughout, and has its
// optimum where that has.
[[nodiscard]] analysis::Polynomial cuda_chunk_seconds(CudaWork work, DType dtype, const analysis::HeadDims& dims);

// The power of two that makes training (forward and backward) fastest. Forward takes the same: what it keeps for
// backward has to fit.
[[nodiscard]] std::int64_t best_cuda_chunk(DType dtype, const analysis::HeadDims& dims);

}  // namespace tfla
