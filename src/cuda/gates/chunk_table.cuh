// The chunk table: which tokens a chunk has.
#pragma once

#include "cuda/common/device.cuh"

namespace tfla::cuda::gates {

// The chunk with this number; past the last chunk of a sequence one of length 0.
template <class Real>
__device__ Chunk chunk_at(const Call<Real>& call, std::int64_t number) {
  std::int64_t low = 0, high = call.dims.sequences;  // the owner is in [low, high)
  if (call.dims.chunks_per_row > 0) {
    // A division in 64 bits takes long.
    low = static_cast<unsigned>(number) / static_cast<unsigned>(call.dims.chunks_per_row);
    high = low + 1;
  }
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first_chunk(call, middle) <= number ? low : high) = middle;
  }
  const std::int64_t start = sequence_start(call, low);
  const std::int64_t length = max(sequence_start(call, low + 1) - start, static_cast<std::int64_t>(0));
  const std::int64_t first = first_chunk(call, low);
  const std::int64_t begin = (number - first) * call.dims.L;
  const bool dense = call.packing.cu_seqlens == nullptr;
  return {.token = dense ? begin : start + begin,
          .packed = start + begin,
          .batch = dense ? static_cast<int>(low) : 0,
          .sequence = static_cast<int>(low),
          .length = static_cast<int>(
              max(static_cast<std::int64_t>(0), min(static_cast<std::int64_t>(call.dims.L), length - begin))),
          .first = static_cast<int>(first)};
}

}  // namespace tfla::cuda::gates
