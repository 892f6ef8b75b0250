// The segments of sequences that blocks of threads work through, rows of the batch and packed sequences alike.
#pragma once

#include <algorithm>

#include "cuda/arch/barrier.cuh"
#include "cuda/call.h"
#include "cuda/sm90/divider.h"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90 {

struct Segment {
  int sequence, index;    // index: of the sequence's segments
  int start, length;      // tokens of all sequences before this one, where its vectors begin, and of the sequence
  int chunks, low, high;  // of the sequence; of the segment [low, high)

  __device__ __forceinline__ Segment(const Call<float>& call, Divider by_sequences, unsigned number,
                                     unsigned chunk_tokens, int later = 0) {
    if (call.cu_seqlens == nullptr) {
      index = static_cast<int>(by_sequences.quotient(number));
      sequence = static_cast<int>(number) - index * static_cast<int>(call.sequences);
      length = static_cast<int>(call.tokens);
      start = sequence * length;
      chunks = call.chunks_per_row;
    } else {
      const Part part = call.parts[1 + number];
      sequence = part.sequence;
      index = part.segment + later;
      start = part.start;
      length = part.length;
      chunks = static_cast<int>((length + chunk_tokens - 1) / chunk_tokens);
    }
    low = min(index * call.chunks_per_segment, chunks);
    high = min(low + call.chunks_per_segment, chunks);
  }
  // An empty sequence still passes its state on.
  __device__ bool has_work() const { return low < high || chunks == 0; }

  // Coordinates of its first token in a token_map. Not kept: movers are short of registers.
  __device__ __forceinline__ int map_token(const Call<float>& call) const {
    return call.cu_seqlens == nullptr ? 0 : static_cast<int>(call.tokens) - length;
  }
  __device__ __forceinline__ int map_batch(const Call<float>& call) const {
    return call.cu_seqlens == nullptr ? sequence : start + length;
  }

  // Number of the sequence's first chunk, as first_chunk has it.
  __device__ __forceinline__ int first_number(const Call<float>& call, int chunk_tokens) const {
    if (call.chunks_per_row > 0) return sequence * call.chunks_per_row;
    return start / chunk_tokens + sequence;
  }
};

// Units of work: heads and tiles of segments.
struct Units {
  int in_segment;
  int all;  // at most

  Units(const Call<float>& call, int in_segment) : in_segment(in_segment) {
    const std::int64_t segments = call.cu_seqlens == nullptr ? call.sequences * call.segments : call.most_parts();
    all = static_cast<int>(segments * in_segment);
  }
  [[nodiscard]] int blocks() const { return std::min(all, multiprocessors()); }

  // With `followed` only those of segments that another one follows, where sequences are packed.
  __device__ __forceinline__ int count(const Call<float>& call, bool followed) const {
    if (call.cu_seqlens == nullptr) return all;
    return (followed ? call.parts[0].segment : call.parts[0].sequence) * in_segment;
  }
};

// Those of this block of threads. Packed segments come the longest first, and every other round of blocks goes the
// other way, so that all end at about the same time. Short: registers are.
template <bool Short = false, class Work>
__device__ __forceinline__ void each_unit(const Call<float>& call, bool followed, const Units& units,
                                          const Work& work) {
  const auto blocks = [] { return static_cast<int>(Short ? arch::grid_blocks() : gridDim.x); };
  int unit = static_cast<int>(blockIdx.x), step = call.cu_seqlens == nullptr ? blocks() : 2 * (blocks() - unit) - 1;
#pragma unroll 1
  while (unit < units.count(call, followed)) {  // read again every time: one register less
    work(unit);
    unit += step;
    step = 2 * blocks() - step;
  }
}

}  // namespace tfla::cuda::sm90
