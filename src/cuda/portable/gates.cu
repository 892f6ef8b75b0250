// Stage `gates`: chunk table, the scan inside chunks, the scan over chunks, and the vectors every matrix kernel reads.
// All in double: sums of log f reach the hundreds, and there are only T of them.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/portable/device.cuh"

namespace tfla::cuda {

namespace {

// The parts of one sequence. Bad boundaries, which the host cannot see, do not lead out of the list.
template <class Real>
__device__ void list_parts(const Call<Real>& call, int sequence) {
  const auto size = static_cast<unsigned>(call.segment_tokens());
  const auto followed = [&](unsigned length) { return length > 0 ? (length - 1) / size : 0; };
  const auto length_from = [&](std::int64_t start, std::int64_t end) {
    return static_cast<unsigned>(max(end - start, std::int64_t{0}));
  };
  const std::int64_t own_start = sequence_start(call, sequence);
  const unsigned own = length_from(own_start, sequence_start(call, sequence + 1));
  const unsigned own_followed = followed(own), own_rest = own - own_followed * size;
  unsigned before = 0, all = 0, rank = 0;
  std::int64_t start = sequence_start(call, 0);
  for (int s = 0; s < call.sequences; ++s) {
    const std::int64_t end = sequence_start(call, s + 1);
    const unsigned length = length_from(start, end), count = followed(length), rest = length - count * size;
    start = end;
    all += count;
    if (s < sequence) before += count;
    if (rest > own_rest || (rest == own_rest && s < sequence)) ++rank;
  }
  const auto most = static_cast<unsigned>(call.most_parts());
  const auto list = [&](unsigned place, unsigned segment) {
    if (place < most)
      call.parts[1 + place] = {sequence, static_cast<int>(segment), static_cast<int>(own_start), static_cast<int>(own)};
  };
  for (unsigned segment = 0; segment < own_followed; ++segment) list(before + segment, segment);
  list(all + rank, own_followed);
  if (sequence != 0) return;
  const auto parts = static_cast<unsigned>(call.sequences) + all;
  call.parts[0] = {static_cast<int>(min(parts, most)), static_cast<int>(min(all, most)), 0, 0};
}

template <class Real>
__global__ void chunk_table_kernel(Call<Real> call) {
  const std::int64_t number = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (number >= call.numbers) return;
  if (call.parts != nullptr && call.cu_seqlens != nullptr && number < call.sequences)
    list_parts(call, static_cast<int>(number));
  std::int64_t low = 0, high = call.sequences;  // the owner is in [low, high)
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first_chunk(call, middle) <= number ? low : high) = middle;
  }
  const std::int64_t start = sequence_start(call, low);
  const std::int64_t length = max(sequence_start(call, low + 1) - start, static_cast<std::int64_t>(0));
  const std::int64_t first = first_chunk(call, low);
  const std::int64_t begin = (number - first) * call.L;
  const bool dense = call.cu_seqlens == nullptr;
  call.chunks[number] = {.token = dense ? begin : start + begin,
                         .packed = start + begin,
                         .batch = dense ? static_cast<int>(low) : 0,
                         .sequence = static_cast<int>(low),
                         .length = static_cast<int>(
                             max(static_cast<std::int64_t>(0), min(static_cast<std::int64_t>(call.L), length - begin))),
                         .first = static_cast<int>(first)};
}

// b, c and the running maximum of c inside a chunk: one warp per chunk and head, two tokens per lane, since the scans
// over lanes take most of the time.
template <class Real>
__global__ void chunk_scan_kernel(Call<Real> call) {
  const std::int64_t unit = (blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x) / warp_size;
  if (unit >= call.numbers * call.heads) return;
  const Chunk chunk = call.chunks[unit / call.heads];
  const int head = static_cast<int>(unit % call.heads);
  const int lane = threadIdx.x % warp_size;
  const std::int64_t at = call.vector(chunk, head);
  constexpr int tokens_per_lane = 2;
  double total = 0, highest = -INFINITY;
  for (int start = 0; start < chunk.length; start += tokens_per_lane * warp_size) {
    const int first = start + tokens_per_lane * lane;
    double f[tokens_per_lane] = {}, i[tokens_per_lane] = {}, b[tokens_per_lane], top[tokens_per_lane];
#pragma unroll
    for (int x = 0; x < tokens_per_lane; ++x)
      if (first + x < chunk.length) log_gates(call, chunk.batch, chunk.token + first + x, head, f[x], i[x]);
    const double sum = warp_scan(f[0] + f[1], [](double x, double y) { return x + y; });
    const double sum_before = __shfl_up_sync(0xFFFFFFFFU, sum, 1);
    b[0] = (lane == 0 ? total : total + sum_before) + f[0];
    b[1] = b[0] + f[1];
    const auto c = [&](int x) { return first + x < chunk.length ? i[x] - b[x] : -INFINITY; };
    top[1] = fmax(highest, warp_scan(fmax(c(0), c(1)), [](double x, double y) { return fmax(x, y); }));
    const double before = __shfl_up_sync(0xFFFFFFFFU, top[1], 1);
    top[0] = fmax(lane == 0 ? highest : before, c(0));
#pragma unroll
    for (int x = 0; x < tokens_per_lane; ++x) {
      if (first + x >= chunk.length) continue;
      call.b[at + first + x] = b[x];
      call.c[at + first + x] = c(x);
      call.top[at + first + x] = top[x];
    }
    total = __shfl_sync(0xFFFFFFFFU, b[1], warp_size - 1);
    highest = __shfl_sync(0xFFFFFFFFU, top[1], warp_size - 1);
  }
}

constexpr int scan_threads = 128;

// What a run of chunks does to the max state: m becomes b + max(m, top). Such maps compose.
struct MaxMap {
  double b = 0, top = -INFINITY;

  __device__ MaxMap after(const MaxMap& before) const { return {before.b + b, fmax(before.top, top - before.b)}; }
  __device__ MaxMap lane_before(int offset) const {
    return {__shfl_up_sync(0xFFFFFFFFU, b, offset), __shfl_up_sync(0xFFFFFFFFU, top, offset)};
  }
};

// The max state at every chunk start: one block per sequence and head, one thread per chunk at a time.
template <class Real>
__global__ void __launch_bounds__(scan_threads) sequence_scan_kernel(Call<Real> call) {
  __shared__ MaxMap warp_maps[scan_threads / warp_size];
  __shared__ double ends[scan_threads];
  const std::int64_t sequence = blockIdx.x / call.heads;
  const int head = static_cast<int>(blockIdx.x % call.heads);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size;
  const std::int64_t start = sequence_start(call, sequence);
  const int count = chunks_of(call, max(sequence_start(call, sequence + 1) - start, static_cast<std::int64_t>(0)));
  const std::int64_t first = first_chunk(call, sequence);
  double m = 0;
  if (call.m0.data != nullptr) {
    const std::int64_t at = sequence * call.m0.sequence + head * call.m0.head;
    m = static_cast<const Real*>(call.m0.data)[at];
  }
  for (int base = 0; base < count; base += scan_threads) {
    const int x = base + thread;
    MaxMap map;
    if (x < count) {
      const Chunk chunk = call.chunks[first + x];
      const std::int64_t last = call.vector(chunk, head) + chunk.length - 1;
      map = {call.b[last], call.top[last]};
    }
#pragma unroll
    for (int offset = 1; offset < warp_size; offset *= 2) {
      const MaxMap before = map.lane_before(offset);
      if (thread % warp_size >= offset) map = map.after(before);
    }
    if (thread % warp_size == warp_size - 1) warp_maps[warp] = map;
    __syncthreads();
    for (int w = warp - 1; w >= 0; --w) map = map.after(warp_maps[w]);
    // m after chunk x, rounded to the type in which states keep it: a state then says exactly what it was scaled by.
    const double end = call.exponential ? static_cast<double>(static_cast<Real>(map.b + fmax(m, map.top))) : 0.0;
    ends[thread] = end;
    __syncthreads();
    if (x < count) {
      call.m_start[(first + x) * call.heads + head] = thread == 0 ? m : ends[thread - 1];
      call.m_end[(first + x) * call.heads + head] = end;
    }
    m = ends[min(scan_threads, count - base) - 1];
    __syncthreads();  // before the next round writes there
  }
  if (thread == 0 && call.m_last.data != nullptr) {
    const std::int64_t at = sequence * call.m_last.sequence + head * call.m_last.head;
    static_cast<Real*>(call.m_last.data)[at] = static_cast<Real>(m);
  }
}

// exp(x). float32 work has no use for all digits of a double's: with it gate_vectors took 35 us instead of 22 (H200).
__device__ double exponential(double x, double /*as*/) { return exp(x); }
__device__ float exponential(double x, float /*as*/) {
  float2 parts;
  as_exponent(x, parts);
  return exp2f(parts.x) * (1 + static_cast<float>(1 / log2_e) * parts.y);
}

// The vectors that matrix kernels read: one thread per token and head.
template <class Real>
__global__ void gate_vectors_kernel(Call<Real> call) {
  const unsigned unit = blockIdx.x;
  const Chunk chunk = call.chunks[unit / call.heads];
  const int head = static_cast<int>(unit % call.heads);
  if (chunk.length == 0) return;
  const std::int64_t at = call.vector(chunk, head);
  const double m_start = call.m_start[unit], m_end = call.m_end[unit];
  const double b_last = call.b[at + chunk.length - 1];
  for (int t = threadIdx.x; t < chunk.length; t += blockDim.x) {
    const double c = call.c[at + t];
    const double u = row_exponent(call, at, t, m_start);
    as_exponent(u, call.u[at + t]);
    as_exponent(c, call.log_c[at + t]);
    call.qbar[at + t] = exponential(u + m_start, Real{});
    call.abar[at + t] = exponential(b_last + c - m_end, Real{});
    if (!call.normalized && call.h.data != nullptr) {  // backward has them from forward, or makes them
      call.inverse[at + t] = 1;
      call.slope[at + t] = 0;
    }
    if (call.floor != nullptr) call.floor[at + t] = exponential(u - call.b[at + t], Real{});
  }
  if (threadIdx.x == 0) call.gbar[unit] = static_cast<Real>(exp(b_last + m_start - m_end));
}

__host__ unsigned warps_as_blocks(std::int64_t units) {
  return static_cast<unsigned>((units * warp_size + scan_threads - 1) / scan_threads);
}

}  // namespace

template <class Real>
void launch_gates(const Call<Real>& call, cudaStream_t stream) {
  if (call.numbers == 0) return;
  const auto tables = static_cast<unsigned>((call.numbers + scan_threads - 1) / scan_threads);
  chunk_table_kernel<<<tables, scan_threads, 0, stream>>>(call);
  check_launch("chunk_table");
  chunk_scan_kernel<<<warps_as_blocks(call.numbers * call.heads), scan_threads, 0, stream>>>(call);
  check_launch("chunk_scan");
  sequence_scan_kernel<<<static_cast<unsigned>(call.sequences * call.heads), scan_threads, 0, stream>>>(call);
  check_launch("sequence_scan");
  const int vector_threads = std::min(scan_threads, (call.L + warp_size - 1) / warp_size * warp_size);
  gate_vectors_kernel<<<static_cast<unsigned>(call.numbers * call.heads), vector_threads, 0, stream>>>(call);
  check_launch("gate_vectors");
}

template void launch_gates(const Call<float>&, cudaStream_t);
template void launch_gates(const Call<double>&, cudaStream_t);

}  // namespace tfla::cuda
