// The segments of packed sequences that CTAs work through.
#pragma once

#include <algorithm>

#include "cuda/call.h"
#include "cuda/sm90/common/divider.h"
#include "cuda/sm90/entry.h"

namespace tfla::cuda::sm90 {

struct Segment {
  int sequence, segment;  // segment: its number in the sequence
  int start, length;      // of the sequence: tokens before it, where its vectors begin, and its tokens
  int chunks, low, high;  // chunks of the sequence; those of the segment are [low, high)

  // later: 0 for the segment of that number in the list, 1 for the one that follows it in its sequence.
  __device__ __forceinline__ Segment(const Call<float>& call, unsigned number, unsigned chunk_tokens, int later = 0) {
    const PackedSegment listed = call.packing.segments[1 + number];
    sequence = listed.sequence;
    segment = listed.segment + later;
    start = listed.start;
    length = listed.length;
    chunks = static_cast<int>((length + chunk_tokens - 1) / chunk_tokens);
    low = min(segment * call.dims.chunks_per_segment, chunks);
    high = min(low + call.dims.chunks_per_segment, chunks);
  }
  // An empty sequence still passes its state on.
  __device__ bool has_work() const { return low < high || chunks == 0; }

  // Coordinates of the sequence's first token in a token_map. Computed where they are used: load and store warps are
  // short of registers.
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
  int ctas;  // the size of the grid; read from here it takes no register

  // residents: CTAs of a multiprocessor.
  Units(const Call<float>& call, int in_segment, int residents = 1)
      : in_segment(in_segment),
        ctas(std::min(static_cast<int>(call.dims.most_packed_segments()) * in_segment, multiprocessors() * residents)) {
  }

  // followed: only those of segments that another one follows.
  __device__ __forceinline__ int count(const Call<float>& call, bool followed) const {
    return (followed ? call.packing.segments[0].segment : call.packing.segments[0].sequence) * in_segment;
  }
};

// Visits the units of this CTA. Segments are listed the longest first, and every other round goes through the CTAs in
// the other order, so that all end at about the same time.
template <class Visit>
__device__ __forceinline__ void each_unit(const Call<float>& call, bool followed, const Units& units,
                                          const Visit& visit) {
  int unit = static_cast<int>(blockIdx.x), step = 2 * (units.ctas - unit) - 1;
#pragma unroll 1
  while (unit < units.count(call, followed)) {  // read again every time: one register less
    visit(unit);
    unit += step;
    step = 2 * units.ctas - step;
  }
}

}  // namespace tfla::cuda::sm90
