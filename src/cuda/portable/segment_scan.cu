// The scan over the totals of segments, or of their pieces, that gives the state at every segment's start.
#include <algorithm>

#include "cuda/portable/block_gemm.cuh"
#include "cuda/portable/state_flow.cuh"

namespace tfla::cuda {

namespace {

// Elements of a state that a thread takes together. Rows are padded to eight.
template <class Real>
constexpr int scan_width = 16 / static_cast<int>(sizeof(Real));

// Numbers that lie side by side and go through memory together.
template <class Number, int Count>
struct alignas(Count * sizeof(Number)) Group {
  static constexpr int count = Count;
  Number x[Count];
};

// Replaces the total of each segment's first piece by the state that the segment starts from: the sum of the totals
// before it, each decayed by what lies between. `parts` CTAs share a state.
template <class T, Time Direction>
__global__ void __launch_bounds__(block_threads) segment_scan_kernel(Call<typename Config<T>::Real> call, int parts) {
  using Real = typename Config<T>::Real;
  using Norm = typename Config<T>::Norm;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const unsigned unit = blockIdx.x / parts;
  const int head = static_cast<int>(unit % call.dims.heads);
  const std::int64_t sequence = unit / call.dims.heads;
  const Flow<T, Direction> flow{call, head};
  __shared__ Norm decays[largest_pieces];
  const int pieces = call.dims.pieces;
  for (int p = static_cast<int>(threadIdx.x) / warp_size; p < call.dims.segments * pieces; p += block_warps) {
    const Segment<Real> piece(call, sequence, p, call.dims.chunks_per_piece);
    const auto unit_of = [&](int chunk) { return (piece.first + chunk) * call.dims.heads + head; };
    const int lane = threadIdx.x % warp_size;
    double b = 0;
#pragma unroll 8
    for (int x = piece.low + lane; x < piece.high; x += warp_size) b += call.gates.b_last[unit_of(x)];
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) b += __shfl_xor_sync(0xFFFFFFFFU, b, offset);
    if (lane == 0 && piece.low < piece.high)
      decays[p] = exp(b + call.gates.m_start[unit_of(piece.low)] - call.gates.m_end[unit_of(piece.high - 1)]);
  }
  __syncthreads();
  const Segment<Real> whole(call, sequence, 0, call.dims.chunks_per_piece);
  const int used = (whole.chunks + call.dims.chunks_per_piece - 1) / call.dims.chunks_per_piece;
  // Pieces in the order of time, up to the one that the last segment begins with; nothing needs totals from there on.
  const int count = used == 0 ? 0 : Direction == Time::forward ? (used - 1) / pieces * pieces : max(used - pieces, 0);
  const auto scan = [&](auto running, const auto& totals) {
    using Number = decltype(running);
    constexpr int ahead = 8;  // loads in flight
    if (used == 0) totals(0) = running;
    for (int first = 0; first <= count && used > 0; first += ahead) {
      Number sums[ahead];
      const auto index = [&](int x) { return Direction == Time::forward ? first + x : used - 1 - first - x; };
#pragma unroll
      for (int x = 0; x < ahead; ++x)
        if (first + x < count) sums[x] = totals(index(x));
#pragma unroll
      for (int x = 0; x < ahead; ++x) {
        if (first + x > count) break;
        const int begun = Direction == Time::forward ? index(x) : index(x) + 1;  // the number of pieces before it
        if (begun % pieces == 0 || first + x == 0) totals(index(x)) = running;
        if (first + x >= count) continue;
        const auto decay = static_cast<decltype(running.x[0] + 0)>(decays[index(x)]);
#pragma unroll
        for (int e = 0; e < Number::count; ++e) running.x[e] = decay * running.x[e] + sums[x].x[e];
      }
    }
  };
  using Wide = Group<Real, scan_width<Real>>;
  const std::int64_t columns = call.dims.padded_dhv(), matrix = call.dims.dqk * columns / Wide::count;
  const std::int64_t step = static_cast<std::int64_t>(parts) * block_threads;
  for (std::int64_t group = blockIdx.x % parts * block_threads + threadIdx.x; group < matrix + call.dims.dqk;
       group += step) {
    if (group >= matrix) {
      const std::int64_t r = group - matrix;
      Group<Norm, 1> first{};
      if (flow.from_n().data != nullptr) first.x[0] = state_element<Real>(flow.from_n(), sequence, head, 0, r);
      scan(first, [&](int index) -> Group<Norm, 1>& {
        return reinterpret_cast<Group<Norm, 1>&>(segment_norm<T>(call, sequence, head, index)[r]);
      });
    } else {
      const std::int64_t element = group * Wide::count, r = element / columns, c = element % columns;
      Wide first{};
      if (flow.from_C().data != nullptr)
#pragma unroll
        for (int e = 0; e < Wide::count; ++e)
          if (c + e < call.dims.dhv) first.x[e] = state_element<Real>(flow.from_C(), sequence, head, r, c + e);
      scan(first, [&](int index) -> Wide& {
        return reinterpret_cast<Wide&>(segment_state(call, sequence, head, index)[element]);
      });
    }
  }
}

}  // namespace

template <class T>
void launch_segment_scan(const Call<typename Config<T>::Real>& call, Time direction, int multiprocessors,
                         cudaStream_t stream) {
  const std::int64_t states = call.dims.sequences * call.dims.heads;
  if (states == 0) return;
  const std::int64_t groups =
      static_cast<std::int64_t>(call.dims.dqk) * (call.dims.padded_dhv() / scan_width<typename Config<T>::Real> + 1);
  const std::int64_t wanted_ctas = std::int64_t{8} * multiprocessors;  // that are resident together
  const std::int64_t parts =
      std::clamp<std::int64_t>(wanted_ctas / states, 1, (groups + block_threads - 1) / block_threads);
  launch_chained(
      "segment_scan",
      direction == Time::forward ? segment_scan_kernel<T, Time::forward> : segment_scan_kernel<T, Time::reverse>,
      states * parts, block_threads, 0, stream, call, static_cast<int>(parts));
}

#define TFLA_INSTANTIATE(T) \
  template void launch_segment_scan<T>(const Call<typename Config<T>::Real>&, Time, int, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
