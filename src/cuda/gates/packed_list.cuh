// The list of the segments of packed sequences, from which Hopper's kernels take their work.
#pragma once

#include "cuda/common/device.cuh"

namespace tfla::cuda::gates {

// Lengths that differ by less than an eighth are of one class. Longer ones have higher numbers.
inline constexpr int length_classes = 256;
__device__ __forceinline__ unsigned length_class(unsigned length) {
  constexpr unsigned one = 0x3F800000U >> 20;  // the leading bits of 1.0F
  return length == 0 ? 0 : (__float_as_uint(static_cast<float>(length)) >> 20) - one + 1;
}

// Adds one to a counter for each of the lanes that share it, `peers`, and returns what it is before this lane's.
__device__ __forceinline__ unsigned take_number(unsigned& counter, unsigned peers) {
  const unsigned lane = threadIdx.x % warp_size;
  const int leader = __ffs(static_cast<int>(peers)) - 1;
  unsigned first = 0;
  if (static_cast<int>(lane) == leader) first = atomicAdd(&counter, static_cast<unsigned>(__popc(peers)));
  return __shfl_sync(peers, first, leader) + static_cast<unsigned>(__popc(peers & ((1U << lane) - 1)));
}

// Counters in shared memory: of the segments that another one follows, and of the last segments of each class.
struct ListCounters {
  unsigned followed, next_followed;
  unsigned last[length_classes];  // how many; then the place of the next one
};

// Lists the segments of all sequences, by a CTA of so many threads; PackedSegment says in which order. Each sequence is
// looked at twice, to count classes of lengths and to put it among its own. The host cannot see the boundaries of
// sequences: bad ones do not lead out of the list.
template <int Threads, class Real>
__device__ void list_segments(const Call<Real>& call) {
  static_assert(Threads >= length_classes);
  __shared__ ListCounters counters;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto size = static_cast<unsigned>(call.dims.segment_tokens());
  const auto sequences = static_cast<int>(call.dims.sequences);
  // visit(sequence, start, length, followed, class of the last segment, lanes of that class)
  const auto each_sequence = [&](const auto& visit) {
    for (int base = 0; base < sequences; base += Threads) {
      const int sequence = base + thread;
      const unsigned active = __ballot_sync(0xFFFFFFFFU, sequence < sequences);
      if (sequence >= sequences) continue;
      const std::int64_t start = sequence_start(call, sequence);
      const auto length = static_cast<unsigned>(max(sequence_start(call, sequence + 1) - start, std::int64_t{0}));
      const unsigned followed = length > 0 ? (length - 1) / size : 0;
      const unsigned own_class = length_class(length - followed * size);
      visit(sequence, static_cast<int>(start), static_cast<int>(length), followed, own_class,
            __match_any_sync(active, own_class));
    }
  };
  if (thread < length_classes) counters.last[thread] = 0;
  if (thread == 0) counters.followed = counters.next_followed = 0;
  __syncthreads();
  each_sequence([&](int, int, int, unsigned followed, unsigned own_class, unsigned peers) {
    take_number(counters.last[own_class], peers);
    if (followed > 0) atomicAdd(&counters.followed, followed);
  });
  __syncthreads();
  const unsigned followed_segments = counters.followed;
  unsigned place = followed_segments;  // of the first of a class: behind all that are longer
#pragma unroll 8
  for (int longer = thread + 1; longer < length_classes; ++longer) place += counters.last[longer];
  __syncthreads();
  if (thread < length_classes) counters.last[thread] = place;
  __syncthreads();
  const auto most = static_cast<unsigned>(call.dims.most_packed_segments());
  each_sequence([&](int sequence, int start, int length, unsigned followed, unsigned own_class, unsigned peers) {
    const auto list = [&](unsigned at, unsigned segment) {
      if (at < most) call.packing.segments[1 + at] = {sequence, static_cast<int>(segment), start, length};
    };
    list(take_number(counters.last[own_class], peers), followed);
    const unsigned first = followed > 0 ? atomicAdd(&counters.next_followed, followed) : 0;
    for (unsigned segment = 0; segment < followed; ++segment) list(first + segment, segment);
  });
  if (thread != 0) return;
  const unsigned count = static_cast<unsigned>(sequences) + followed_segments;
  call.packing.segments[0] = {static_cast<int>(min(count, most)), static_cast<int>(min(followed_segments, most)), 0, 0};
}

}  // namespace tfla::cuda::gates
