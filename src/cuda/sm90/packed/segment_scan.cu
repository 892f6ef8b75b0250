// segment_scan of packed sequences: turns the totals of segments into the states at their boundaries. A state is the
// sum of the totals before its boundary (in reverse time: after it), each decayed over the segments that lie between.
#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/entry.h"

namespace tfla::cuda::sm90 {

namespace {

constexpr int threads = 256;

__device__ __forceinline__ void add(float& sum, float decay, float total) { sum = decay * sum + total; }
__device__ __forceinline__ void add(float4& sum, float decay, const float4& total) {
  add(sum.x, decay, total.x);
  add(sum.y, decay, total.y);
  add(sum.z, decay, total.z);
  add(sum.w, decay, total.w);
}

// The decay of the state over every segment of a sequence. A warp takes a segment.
__device__ __forceinline__ void find_decays(const Call<float>& call, const PackedSegment& sequence, int segments,
                                            int head, float* decays) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunks = (sequence.length + call.dims.L - 1) / call.dims.L,
            number = sequence.start / call.dims.L + sequence.sequence;
  const auto unit_of = [&](int chunk) { return static_cast<std::int64_t>(number + chunk) * call.dims.heads + head; };
  for (int s = static_cast<int>(threadIdx.x) / 32; s < segments; s += threads / 32) {
    const int low = s * call.dims.chunks_per_segment, high = min(low + call.dims.chunks_per_segment, chunks);
    double b = 0;
    for (int x = low + lane; x < high; x += 32) b += call.gates.b_last[unit_of(x)];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) b += __shfl_xor_sync(0xFFFFFFFFU, b, offset);
    if (lane == 0)
      decays[s] = static_cast<float>(exp(b + call.gates.m_start[unit_of(low)] - call.gates.m_end[unit_of(high - 1)]));
  }
}

// Over the boundaries of a sequence, in the order of time. at(x): the number at boundary x, which is one of a total
// before and one of the state after.
template <bool Reverse, class Number, class At>
__device__ __forceinline__ void scan(Number running, int segments, const float* decays, const At& at) {
  constexpr int ahead = 8;  // loads in flight
  for (int first = 0; first + 1 < segments; first += ahead) {
    Number totals[ahead];
    const auto boundary = [&](int x) { return Reverse ? segments - 2 - first - x : first + x; };
#pragma unroll
    for (int x = 0; x < ahead; ++x)
      if (first + x + 1 < segments) totals[x] = at(boundary(x));
#pragma unroll
    for (int x = 0; x < ahead; ++x) {
      if (first + x + 1 >= segments) break;
      add(running, decays[Reverse ? boundary(x) + 1 : boundary(x)], totals[x]);
      at(boundary(x)) = running;
    }
  }
}

// `head_ctas` CTAs share a head.
template <bool Reverse>
__global__ void __launch_bounds__(threads) packed_segment_scan_kernel(Call<float> call, int head_ctas) {
  __shared__ float decays[largest_pieces];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.x) / head_ctas, cta = static_cast<int>(blockIdx.x) % head_ctas;
  const int columns = call.dims.padded_dhv();
  const std::int64_t state = static_cast<std::int64_t>(call.dims.dqk) * columns, quads = state / 4;
  const StridedState& from = Reverse ? call.carried.dC_last : call.carried.C0;
  const int listed = call.packing.segments[0].segment;
  for (int listing = 1; listing <= listed; ++listing) {
    const PackedSegment sequence = call.packing.segments[listing];
    if (sequence.segment != 0) continue;  // once for every sequence
    const auto tokens = static_cast<int>(call.dims.segment_tokens());
    const int segments = min((sequence.length + tokens - 1) / tokens, largest_pieces);
    find_decays(call, sequence, segments, head, decays);
    __syncthreads();
    const std::int64_t first = call.dims.boundary(sequence.start, 0, head);
    const auto place = [&](int boundary) { return first + static_cast<std::int64_t>(boundary) * call.dims.heads; };
    for (std::int64_t quad = cta * threads + static_cast<int>(threadIdx.x); quad < quads;
         quad += static_cast<std::int64_t>(head_ctas) * threads) {
      float4 running{};
      if (from.data != nullptr) {
        const std::int64_t r = 4 * quad / columns, c = 4 * quad % columns;  // dhv is a multiple of eight
        const float* row = static_cast<const float*>(from.data) + sequence.sequence * from.sequence + head * from.head +
                           r * from.row + c;
        running = {row[0], row[1], row[2], row[3]};
      }
      scan<Reverse>(running, segments, decays, [&](int boundary) -> float4& {
        return reinterpret_cast<float4*>(call.stored.segment_C + place(boundary) * state)[quad];
      });
    }
    // In reverse time n has no total.
    for (int r = cta * threads + static_cast<int>(threadIdx.x); r < call.dims.dqk && !Reverse;
         r += head_ctas * threads) {
      float running = 0;
      if (call.carried.n0.data != nullptr)
        running = static_cast<const float*>(
            call.carried.n0.data)[sequence.sequence * call.carried.n0.sequence + head * call.carried.n0.head + r];
      scan<Reverse>(running, segments, decays, [&](int boundary) -> float& {
        return static_cast<float*>(call.stored.segment_n)[place(boundary) * call.dims.dqk + r];
      });
    }
    __syncthreads();  // no thread reads the decays of this sequence any more
  }
}

}  // namespace

void launch_packed_segment_scan(const Call<float>& call, bool reverse, cudaStream_t stream) {
  const std::int64_t quads = static_cast<std::int64_t>(call.dims.dqk) * call.dims.padded_dhv() / 4;
  constexpr std::int64_t wanted_ctas = 1056;  // eight to a multiprocessor
  const std::int64_t head_ctas =
      std::clamp<std::int64_t>(wanted_ctas / call.dims.heads, 1, (quads + threads - 1) / threads);
  launch_chained("packed_segment_scan", reverse ? packed_segment_scan_kernel<true> : packed_segment_scan_kernel<false>,
                 call.dims.heads * head_ctas, threads, 0, stream, call, static_cast<int>(head_ctas));
}

}  // namespace tfla::cuda::sm90
