// Stage `gates`: chunk table, the scan inside chunks, the scan over chunks, and the vectors every matrix kernel reads.
// All in double: sums of log f reach the hundreds, and there are only T of them.
#include "cuda/launch.h"
#include "cuda/portable/device.cuh"

namespace tfla::cuda {

namespace {

template <class Real>
__global__ void chunk_table_kernel(Call<Real> call) {
  const std::int64_t number = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (number >= call.numbers) return;
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

// b, c and the running maximum of c inside a chunk: one warp per chunk and head.
template <class Real>
__global__ void chunk_scan_kernel(Call<Real> call) {
  const std::int64_t unit = (blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x) / warp_size;
  if (unit >= call.numbers * call.heads) return;
  const Chunk chunk = call.chunks[unit / call.heads];
  const int head = static_cast<int>(unit % call.heads);
  const int lane = threadIdx.x % warp_size;
  const std::int64_t at = call.vector(chunk, head);
  double total = 0, highest = -INFINITY;
  for (int start = 0; start < chunk.length; start += warp_size) {
    const int t = start + lane;
    const bool valid = t < chunk.length;
    double f = 0, i = 0;
    if (valid) log_gates(call, chunk.batch, chunk.token + t, head, f, i);
    const double b = total + warp_scan(valid ? f : 0.0, [](double x, double y) { return x + y; });
    const double c = valid ? i - b : -INFINITY;
    const double top = fmax(highest, warp_scan(c, [](double x, double y) { return fmax(x, y); }));
    if (valid) {
      call.b[at + t] = b;
      call.c[at + t] = c;
      call.top[at + t] = top;
    }
    total = __shfl_sync(0xFFFFFFFFU, b, warp_size - 1);
    highest = __shfl_sync(0xFFFFFFFFU, top, warp_size - 1);
  }
}

// The max state at every chunk start: one warp per sequence and head. A chunk maps m to b_L + max(m, top_L), and such
// maps compose: (b, top) after (b', top') is (b + b', max(top', top - b')).
template <class Real>
__global__ void sequence_scan_kernel(Call<Real> call) {
  const std::int64_t unit = (blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x) / warp_size;
  if (unit >= call.sequences * call.heads) return;
  const std::int64_t sequence = unit / call.heads;
  const int head = static_cast<int>(unit % call.heads);
  const int lane = threadIdx.x % warp_size;
  const std::int64_t start = sequence_start(call, sequence);
  const int count = chunks_of(call, max(sequence_start(call, sequence + 1) - start, static_cast<std::int64_t>(0)));
  const std::int64_t first = first_chunk(call, sequence);
  double m = 0;
  if (call.m0.data != nullptr) {
    const std::int64_t at = sequence * call.m0.sequence + head * call.m0.head;
    m = static_cast<const Real*>(call.m0.data)[at];
  }
  for (int base = 0; base < count; base += warp_size) {
    const int x = base + lane;
    double b = 0, top = -INFINITY;
    if (x < count) {
      const Chunk chunk = call.chunks[first + x];
      const std::int64_t last = call.vector(chunk, head) + chunk.length - 1;
      b = call.b[last];
      top = call.top[last];
    }
#pragma unroll
    for (int offset = 1; offset < warp_size; offset *= 2) {
      const double b_before = __shfl_up_sync(0xFFFFFFFFU, b, offset);
      const double top_before = __shfl_up_sync(0xFFFFFFFFU, top, offset);
      if (lane >= offset) {
        top = fmax(top_before, top - b_before);
        b += b_before;
      }
    }
    // m after chunk x, rounded to the type in which states keep it: a state then says exactly what it was scaled by.
    const double after = call.exponential ? static_cast<double>(static_cast<Real>(b + fmax(m, top))) : 0.0;
    const double before = __shfl_up_sync(0xFFFFFFFFU, after, 1);
    if (x < count) {
      call.m_start[(first + x) * call.heads + head] = lane == 0 ? m : before;
      call.m_end[(first + x) * call.heads + head] = after;
    }
    m = __shfl_sync(0xFFFFFFFFU, after, min(warp_size, count - base) - 1);
  }
  if (lane == 0 && call.m_last.data != nullptr) {
    const std::int64_t at = sequence * call.m_last.sequence + head * call.m_last.head;
    static_cast<Real*>(call.m_last.data)[at] = static_cast<Real>(m);
  }
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
    call.qbar[at + t] = static_cast<Real>(exp(u + m_start));
    call.abar[at + t] = static_cast<Real>(exp(b_last + c - m_end));
  }
  if (threadIdx.x == 0) call.gbar[unit] = static_cast<Real>(exp(b_last + m_start - m_end));
}

constexpr int scan_threads = 128;

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
  sequence_scan_kernel<<<warps_as_blocks(call.sequences * call.heads), scan_threads, 0, stream>>>(call);
  check_launch("sequence_scan");
  gate_vectors_kernel<<<static_cast<unsigned>(call.numbers * call.heads), scan_threads, 0, stream>>>(call);
  check_launch("gate_vectors");
}

template void launch_gates(const Call<float>&, cudaStream_t);
template void launch_gates(const Call<double>&, cudaStream_t);

}  // namespace tfla::cuda
