// The list of the segments of packed sequences, from which Hopper's kernels take their work.
#pragma once

#include "cuda/common/device.cuh"

namespace tfla::cuda::gates {

// Lists the segments of one sequence, by a warp; PackedSegment says in which order. The host cannot see the boundaries
// of sequences: bad ones do not lead out of the list.
template <class Real>
__device__ void list_segments(const Call<Real>& call, int sequence) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const auto size = static_cast<unsigned>(call.dims.segment_tokens());
  const auto followed = [&](unsigned length) { return length > 0 ? (length - 1) / size : 0; };
  const auto length_of = [&](int s) {
    return static_cast<unsigned>(max(sequence_start(call, s + 1) - sequence_start(call, s), std::int64_t{0}));
  };
  const unsigned own = length_of(sequence);
  const unsigned own_followed = followed(own), own_rest = own - own_followed * size;
  unsigned before = 0, all = 0, rank = 0;
  for (int s = lane; s < call.dims.sequences; s += warp_size) {
    const unsigned length = length_of(s), full = followed(length), rest = length - full * size;
    all += full;
    if (s < sequence) before += full;
    if (rest > own_rest || (rest == own_rest && s < sequence)) ++rank;
  }
#pragma unroll
  for (int offset = warp_size / 2; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(0xFFFFFFFFU, before, offset);
    all += __shfl_xor_sync(0xFFFFFFFFU, all, offset);
    rank += __shfl_xor_sync(0xFFFFFFFFU, rank, offset);
  }
  const auto start = static_cast<int>(sequence_start(call, sequence));
  const auto most = static_cast<unsigned>(call.dims.most_packed_segments());
  const auto list = [&](unsigned place, unsigned segment) {
    if (place < most)
      call.packing.segments[1 + place] = {sequence, static_cast<int>(segment), start, static_cast<int>(own)};
  };
  for (unsigned segment = lane; segment < own_followed; segment += warp_size) list(before + segment, segment);
  if (lane != 0) return;
  list(all + rank, own_followed);
  if (sequence != 0) return;
  const auto count = static_cast<unsigned>(call.dims.sequences) + all;
  call.packing.segments[0] = {static_cast<int>(min(count, most)), static_cast<int>(min(all, most)), 0, 0};
}

}  // namespace tfla::cuda::gates
