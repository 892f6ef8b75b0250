// The segments of packed sequences that blocks of threads work through.
#pragma once

#include <algorithm>

#include "cuda/call.h"
#include "cuda/sm90/common/divider.h"
#include "cuda/sm90/entry.h"

namespace tfla::cuda::sm90 {

struct Segment {
  int sequence, segment;  // segment: of the sequence's
  int start, length;      // tokens before the sequence, where its vectors begin, and of all of it
  int chunks, low, high;  // of the sequence; of the segment [low, high)

  // later: 1: the segment that follows the one that is listed there.
  __device__ __forceinline__ Segment(const Call<float>& call, unsigned number, unsigned chunk_tokens, int later = 0) {
    const PackedSegment part = call.packing.segments[1 + number];
    sequence = part.sequence;
    segment = part.segment + later;
    start = part.start;
    length = part.length;
    chunks = static_cast<int>((length + chunk_tokens - 1) / chunk_tokens);
    low = min(segment * call.dims.chunks_per_segment, chunks);
    high = min(low + call.dims.chunks_per_segment, chunks);
  }
  // An empty sequence still passes its state on.
  __device__ bool has_work() const { return low < high || chunks == 0; }

  // Coordinates of the sequence's first token in a token_map. Not kept: movers are short of registers.
  __device__ __forceinline__ int map_token(const Call<float>& call) const {
    return static_cast<int>(call.dims.tokens) - length;
  }
  __device__ __forceinline__ int map_batch(const Call<float>& /*call*/) const { return start + length; }
  __device__ __forceinline__ int tokens(const Call<float>& /*call*/) const { return length; }

  // Number of the sequence's first chunk, as first_chunk has it.
  __device__ __forceinline__ int first_chunk_number(int chunk_tokens) const { return start / chunk_tokens + sequence; }
};

// Units of work: heads and tiles of segments.
struct Units {
  int in_segment;
  int blocks;  // of threads: read from here it takes no register

  // residents: blocks of a multiprocessor.
  Units(const Call<float>& call, int in_segment, int residents = 1)
      : in_segment(in_segment),
        blocks(
            std::min(static_cast<int>(call.dims.most_packed_segments()) * in_segment, multiprocessors() * residents)) {}

  // followed: only those of segments that another one follows.
  __device__ __forceinline__ int count(const Call<float>& call, bool followed) const {
    return (followed ? call.packing.segments[0].segment : call.packing.segments[0].sequence) * in_segment;
  }
};

// Those of this block of threads. Segments come the longest first, and every other round of blocks goes the other way,
// so that all end at about the same time.
template <class Work>
__device__ __forceinline__ void each_unit(const Call<float>& call, bool followed, const Units& units,
                                          const Work& work) {
  int unit = static_cast<int>(blockIdx.x), step = 2 * (units.blocks - unit) - 1;
#pragma unroll 1
  while (unit < units.count(call, followed)) {  // read again every time: one register less
    work(unit);
    unit += step;
    step = 2 * units.blocks - step;
  }
}

}  // namespace tfla::cuda::sm90
