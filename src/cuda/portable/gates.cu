// Stage `gates`: chunk table and what each chunk does to the max state, the scan over chunks, and the vectors every
// matrix kernel reads. In one kernel or in three.
// Sums in double: those of log f reach the hundreds, and there are only T of them.
#include "cuda/launch.h"
#include "cuda/portable/device.cuh"

namespace tfla::cuda {

namespace {

// The segments of one sequence, listed by a warp. Bad boundaries, which the host cannot see, do not lead out of the
// list.
template <class Real>
__device__ void list_parts(const Call<Real>& call, int sequence) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const auto size = static_cast<unsigned>(call.segment_tokens());
  const auto followed = [&](unsigned length) { return length > 0 ? (length - 1) / size : 0; };
  const auto length_of = [&](int s) {
    return static_cast<unsigned>(max(sequence_start(call, s + 1) - sequence_start(call, s), std::int64_t{0}));
  };
  const unsigned own = length_of(sequence);
  const unsigned own_followed = followed(own), own_rest = own - own_followed * size;
  unsigned before = 0, all = 0, rank = 0;
  for (int s = lane; s < call.sequences; s += warp_size) {
    const unsigned length = length_of(s), count = followed(length), rest = length - count * size;
    all += count;
    if (s < sequence) before += count;
    if (rest > own_rest || (rest == own_rest && s < sequence)) ++rank;
  }
#pragma unroll
  for (int offset = warp_size / 2; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(0xFFFFFFFFU, before, offset);
    all += __shfl_xor_sync(0xFFFFFFFFU, all, offset);
    rank += __shfl_xor_sync(0xFFFFFFFFU, rank, offset);
  }
  const auto start = static_cast<int>(sequence_start(call, sequence));
  const auto most = static_cast<unsigned>(call.most_parts());
  const auto list = [&](unsigned place, unsigned segment) {
    if (place < most) call.parts[1 + place] = {sequence, static_cast<int>(segment), start, static_cast<int>(own)};
  };
  for (unsigned segment = lane; segment < own_followed; segment += warp_size) list(before + segment, segment);
  if (lane != 0) return;
  list(all + rank, own_followed);
  if (sequence != 0) return;
  const auto parts = static_cast<unsigned>(call.sequences) + all;
  call.parts[0] = {static_cast<int>(min(parts, most)), static_cast<int>(min(all, most)), 0, 0};
}

template <class Real>
__device__ Chunk chunk_at(const Call<Real>& call, std::int64_t number) {
  std::int64_t low = 0, high = call.sequences;  // the owner is in [low, high)
  if (call.chunks_per_row > 0) {
    low = static_cast<unsigned>(number) / static_cast<unsigned>(call.chunks_per_row);  // 64 bits take long to divide
    high = low + 1;
  }
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first_chunk(call, middle) <= number ? low : high) = middle;
  }
  const std::int64_t start = sequence_start(call, low);
  const std::int64_t length = max(sequence_start(call, low + 1) - start, static_cast<std::int64_t>(0));
  const std::int64_t first = first_chunk(call, low);
  const std::int64_t begin = (number - first) * call.L;
  const bool dense = call.cu_seqlens == nullptr;
  return {.token = dense ? begin : start + begin,
          .packed = start + begin,
          .batch = dense ? static_cast<int>(low) : 0,
          .sequence = static_cast<int>(low),
          .length = static_cast<int>(
              max(static_cast<std::int64_t>(0), min(static_cast<std::int64_t>(call.L), length - begin))),
          .first = static_cast<int>(first)};
}

// What a run of tokens does to the max state: m becomes b + max(m, top). Such maps compose.
struct MaxMap {
  double b = 0, top = -INFINITY;

  __device__ MaxMap after(const MaxMap& before) const { return {before.b + b, fmax(before.top, top - before.b)}; }
  __device__ MaxMap lane_before(int offset) const {
    return {__shfl_up_sync(0xFFFFFFFFU, b, offset), __shfl_up_sync(0xFFFFFFFFU, top, offset)};
  }
  __device__ MaxMap of_lane(int lane) const {
    return {__shfl_sync(0xFFFFFFFFU, b, lane), __shfl_sync(0xFFFFFFFFU, top, lane)};
  }
};

// The max state that such a map makes of m, rounded to the type in which states keep it: a state then says exactly what
// it was scaled by.
template <class Real>
__device__ double max_state(const Call<Real>& call, double m, const MaxMap& map) {
  return call.exponential ? static_cast<double>(static_cast<Real>(map.b + fmax(m, map.top))) : 0.0;
}

// Kernels with one warp per chunk and head: a block has as many neighbouring heads of a chunk as warps.
constexpr int chunk_threads = 256;
constexpr int heads_per_block = chunk_threads / warp_size;
// On a multiprocessor: mostly they wait.
template <class Work, int TokensPerLane>
constexpr int chunk_blocks = sizeof(Work) == 8    ? 2
                             : TokensPerLane == 2 ? 4
                                                  : 3;

template <class Real>
__host__ __device__ unsigned head_groups(const Call<Real>& call) {
  return (static_cast<unsigned>(call.heads) + heads_per_block - 1) / heads_per_block;
}

// The max state before and after a chunk, and the sum of its log f.
struct ChunkEnds {
  double m_start, m_end, b_last;
};

// Where the two blocks of a chunk meet: the sum of log f up to there, and the max state, in whose scale nothing is
// stored.
struct Middle {
  double b, m;
};

// The gate scan of one chunk, in slabs. Gates are read by tokens, as they lie in memory; scanned by heads, a
// few neighbouring tokens to a lane; and what comes of them is visited by heads again, neighbouring lanes on
// neighbouring tokens, so that vectors are written in long stretches.
template <class Real, class Work, int TokensPerLane>
struct ChunkScan {
  static constexpr int tokens_per_lane = TokensPerLane, slab = tokens_per_lane * warp_size;
  static constexpr bool has_blocks = std::is_same_v<Real, float> && slab == 2 * reverse_block;
  static constexpr int row = slab + 2;  // where eight heads of two tokens lie in banks of their own
  struct Slab {
    double b[heads_per_block][row], c[heads_per_block][row], top[heads_per_block][row];  // first log f, log i
  };

  const Call<Real>& call;
  Slab& shared;
  std::int64_t number, unit;
  int first_head, warp, lane, head;

  __device__ ChunkScan(const Call<Real>& of, Slab& memory)
      : ChunkScan(of, memory, blockIdx.x / head_groups(of), blockIdx.x % head_groups(of)) {}
  __device__ ChunkScan(const Call<Real>& of, Slab& memory, std::int64_t chunk_number, unsigned group)
      : call(of), shared(memory), number(chunk_number), first_head(static_cast<int>(group * heads_per_block)) {
    warp = static_cast<int>(threadIdx.x) / warp_size;
    lane = static_cast<int>(threadIdx.x) % warp_size;
    head = first_head + warp;
    unit = number * call.heads + head;
  }

  // visit(t, b, c, top): the sum of log f up to token t, log i - b, and the running maximum of that. Returns the map of
  // the whole chunk. By all threads of a block; heads beyond the last have maps that change nothing.
  template <bool Visits, class Visit>
  __device__ __forceinline__ MaxMap run(const Chunk& chunk, const Visit& visit) {
    MaxMap all;
    for (int start = 0; start < chunk.length; start += slab) {
      const int count = min(slab, chunk.length - start);
      if (start > 0) __syncthreads();  // the slab before is done with
      read(chunk, start, count);
      __syncthreads();
      all = scan<Visits>(all);
      if (Visits && head < call.heads)
        this->visit(count, [&](int t, double b, double c, double top) { visit(start + t, b, c, top); });
    }
    return all;
  }

  // The same for a chunk that is no longer than a slab, which stays in shared memory to be visited later.
  __device__ __forceinline__ MaxMap whole(const Chunk& chunk) {
    read(chunk, 0, chunk.length);
    __syncthreads();
    return scan<true>(MaxMap());
  }
  template <class Visit>
  __device__ __forceinline__ void visit(int count, const Visit& visit) {
    __syncwarp();
    for (int t = lane; t < count; t += warp_size) visit(t, shared.b[warp][t], shared.c[warp][t], shared.top[warp][t]);
  }
  // Of a chunk that is visited; of a short one its end.
  __device__ __forceinline__ Middle middle(int length, const ChunkEnds& ends) const {
    if (length <= reverse_block) return {ends.b_last, ends.m_end};
    const double b = shared.b[warp][reverse_block - 1];
    return {b, call.exponential ? b + fmax(ends.m_start, shared.top[warp][reverse_block - 1]) : 0.0};
  }

 private:
  __device__ __forceinline__ void read(const Chunk& chunk, int start, int count) {
#pragma unroll
    for (int x = 0; x < slab * heads_per_block / chunk_threads; ++x) {
      const int index = static_cast<int>(threadIdx.x) + x * chunk_threads;
      const int h = index % heads_per_block, t = index / heads_per_block;
      double f = 0, i = -INFINITY;
      if (t < count && first_head + h < call.heads)
        log_gates<Work>(call, chunk.batch, chunk.token + start + t, first_head + h, f, i);
      shared.b[h][t] = f;
      shared.c[h][t] = i;
    }
  }

  template <bool Visits>
  __device__ __forceinline__ MaxMap scan(const MaxMap& before) {
    double b[tokens_per_lane], c[tokens_per_lane], top[tokens_per_lane];
    const int first = tokens_per_lane * lane;
#pragma unroll
    for (int x = 0; x < tokens_per_lane; ++x) {
      b[x] = shared.b[warp][first + x] + (x > 0 ? b[x - 1] : 0);
      c[x] = shared.c[warp][first + x];
    }
    const double sum = warp_scan(b[tokens_per_lane - 1], [](double x, double y) { return x + y; });
    const double sum_before = __shfl_up_sync(0xFFFFFFFFU, sum, 1);
    const double base = lane == 0 ? before.b : before.b + sum_before;
#pragma unroll
    for (int x = 0; x < tokens_per_lane; ++x) {
      b[x] += base;
      c[x] -= b[x];
      top[x] = x > 0 ? fmax(top[x - 1], c[x]) : c[x];
    }
    const double highest = warp_scan(top[tokens_per_lane - 1], [](double x, double y) { return fmax(x, y); });
    const double highest_before = __shfl_up_sync(0xFFFFFFFFU, highest, 1);
    const double floor = lane == 0 ? before.top : fmax(before.top, highest_before);
#pragma unroll
    for (int x = 0; x < tokens_per_lane; ++x) {
      top[x] = fmax(top[x], floor);
      if (!Visits) continue;
      shared.b[warp][first + x] = b[x];
      shared.c[warp][first + x] = c[x];
      shared.top[warp][first + x] = top[x];
    }
    return {__shfl_sync(0xFFFFFFFFU, b[tokens_per_lane - 1], warp_size - 1),
            __shfl_sync(0xFFFFFFFFU, top[tokens_per_lane - 1], warp_size - 1)};
  }
};

// exp(x). float32 work has no use for all digits of a double's: with it gate_vectors took 35 us instead of 22 (H200).
__device__ double exponential(double x, double /*as*/) { return exp(x); }
__device__ float exponential(double x, float /*as*/) {
  float2 parts;
  as_exponent(x, parts);
  return exp2f(parts.x) * (1 + static_cast<float>(1 / log2_e) * parts.y);
}

// Of a token: the exponent of its row, what the incoming state weighs there, what the token does in the outgoing one.
template <class Real>
struct Weights {
  double u;
  Real qbar, abar;
};

// What matrix kernels read of token t, by where the vectors of its chunk and head begin.
template <class Real>
__device__ __forceinline__ Weights<Real> write_vectors(const Call<Real>& call, std::int64_t at, const ChunkEnds& ends,
                                                       double b, double c, double top) {
  const double u = call.exponential ? -fmax(ends.m_start, top) : b;  // b - m, but not as that difference: it rounds
  as_exponent(u, call.u[at]);
  as_exponent(c, call.log_c[at]);
  const Real qbar = exponential(u + ends.m_start, Real{}), abar = exponential(ends.b_last + c - ends.m_end, Real{});
  call.qbar[at] = qbar;
  call.abar[at] = abar;
  if (!call.normalized && call.h.data != nullptr) {  // backward has them from forward, or makes them
    call.inverse[at] = 1;
    call.slope[at] = 0;
  }
  if (call.floor != nullptr) call.floor[at] = exponential(u - b, Real{});
  if (call.c != nullptr) call.c[at] = c;
  return {u, qbar, abar};
}

// Of the first of a chunk's two blocks, counted as chunks of their size would be.
template <class Real>
__device__ std::int64_t block_number(const Call<Real>& call, const Chunk& chunk, std::int64_t number) {
  const std::int64_t before = number - chunk.first;  // chunks of the sequence
  const std::int64_t first = call.cu_seqlens == nullptr
                                 ? chunk.sequence * ((call.tokens + reverse_block - 1) / reverse_block)
                                 : (chunk.packed - before * call.L) / reverse_block + chunk.sequence;
  return first + 2 * before;
}

// What Hopper's reverse-time kernel reads of token t of a chunk.
template <class Scan>
__device__ __forceinline__ void write_block_vectors(const Scan& scan, const Chunk& chunk, std::int64_t at, int t,
                                                    const ChunkEnds& ends, double c, const Weights<float>& weights) {
  const Call<float>& call = scan.call;
  const bool later = t >= reverse_block;
  const Middle middle = scan.middle(chunk.length, ends);
  const float row = static_cast<float>(call.scale) * call.inverse[at];
  float2 exponent;
  as_exponent(weights.u, exponent);
  exponent.y += log2f(row);
  call.block_u[at] = exponent;
  const float inner = exponential(later ? weights.u + middle.m - middle.b : c + middle.b - middle.m, 0.0F);
  call.block_qbar[at] = row * (later ? inner : weights.qbar);
  call.block_abar[at] = later ? weights.abar : inner;
  if (t % reverse_block > 0) return;
  const double decay = later ? ends.b_last - middle.b + middle.m - ends.m_end : middle.b + ends.m_start - middle.m;
  const std::int64_t block = block_number(call, chunk, scan.number) + (later ? 1 : 0);
  call.block_gbar[block * call.heads + scan.head] = exponential(decay, 0.0F);
}

// What is written of a chunk and head.
template <class Scan>
__device__ __forceinline__ auto vector_writer(const Scan& scan, const Chunk& chunk, const ChunkEnds& ends) {
  const std::int64_t at = scan.call.vector(chunk, scan.head);
  return [&scan, &chunk, ends, at](int t, double b, double c, double top) {
    const auto weights = write_vectors(scan.call, at + t, ends, b, c, top);
    if constexpr (Scan::has_blocks) {
      if (scan.call.block_u != nullptr) write_block_vectors(scan, chunk, at + t, t, ends, c, weights);
    }
  };
}

// The chunk table, b and top of every chunk and head, and the list of segments of packed sequences.
template <class Real, class Work, int TokensPerLane, bool Lists>
__global__ void __launch_bounds__(chunk_threads, chunk_blocks<Work, TokensPerLane>)
    chunk_totals_kernel(Call<Real> call) {
  using Scan = ChunkScan<Real, Work, TokensPerLane>;
  __shared__ typename Scan::Slab slab;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  Scan scan(call, slab);
  const Chunk chunk = chunk_at(call, scan.number);
  const MaxMap total = scan.template run<false>(chunk, [](int, double, double, double) {});
  if (threadIdx.x == 0 && scan.first_head == 0) call.chunks[scan.number] = chunk;
  if (Lists && scan.number < call.sequences && scan.first_head == 0 && scan.warp == 0)
    list_parts(call, static_cast<int>(scan.number));
  if (scan.lane != 0 || scan.head >= call.heads) return;
  call.b_last[scan.unit] = total.b;
  call.m_end[scan.unit] = total.top;  // until sequence_scan puts m there
}

constexpr int scan_threads = 256;

// The max state at every chunk start: one block per sequence and head, one thread per chunk at a time.
template <class Real>
__global__ void __launch_bounds__(scan_threads) sequence_scan_kernel(Call<Real> call) {
  __shared__ MaxMap warp_maps[scan_threads / warp_size];
  __shared__ double ends[scan_threads];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
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
    const std::int64_t unit = (first + x) * call.heads + head;
    MaxMap own, map;
    if (x < count) map = own = {call.b_last[unit], call.m_end[unit]};
#pragma unroll
    for (int offset = 1; offset < warp_size; offset *= 2) {
      const MaxMap before = map.lane_before(offset);
      if (thread % warp_size >= offset) map = map.after(before);
    }
    if (thread % warp_size == warp_size - 1) warp_maps[warp] = map;
    __syncthreads();
    for (int w = warp - 1; w >= 0; --w) map = map.after(warp_maps[w]);
    const double end = max_state(call, m, map);  // m after chunk x
    ends[thread] = end;
    __syncthreads();
    if (x < count) {
      const double begin = thread == 0 ? m : ends[thread - 1];
      call.m_start[unit] = begin;
      call.m_end[unit] = end;
      call.gbar[unit] = static_cast<Real>(exp(own.b + begin - end));
    }
    m = ends[min(scan_threads, count - base) - 1];
    __syncthreads();  // before the next round writes there
  }
  if (thread == 0 && call.m_last.data != nullptr) {
    const std::int64_t at = sequence * call.m_last.sequence + head * call.m_last.head;
    static_cast<Real*>(call.m_last.data)[at] = static_cast<Real>(m);
  }
}

// The vectors that matrix kernels read. The scan inside the chunk is done again rather than kept, which would take
// 24 bytes of scratch per token and head.
template <class Real, class Work, int TokensPerLane>
__global__ void __launch_bounds__(chunk_threads, chunk_blocks<Work, TokensPerLane>)
    gate_vectors_kernel(Call<Real> call) {
  using Scan = ChunkScan<Real, Work, TokensPerLane>;
  __shared__ typename Scan::Slab slab;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  Scan scan(call, slab);
  const Chunk chunk = call.chunks[scan.number];
  if (chunk.length == 0) return;
  const std::int64_t unit = min(scan.unit, call.numbers * call.heads - 1);  // heads beyond the last visit nothing
  const ChunkEnds ends{call.m_start[unit], call.m_end[unit], call.b_last[unit]};
  scan.template run<true>(chunk, vector_writer(scan, chunk, ends));
}

// All three in one kernel, for dense batches of few chunks that fit a slab. The blocks of a row are a cluster, and each
// reads what the chunks before its own do to the max state from their blocks. Not for GPUs without clusters.
template <class Real, class Work, int TokensPerLane>
__global__ void __launch_bounds__(chunk_threads, chunk_blocks<Work, TokensPerLane>) gates_kernel(Call<Real> call) {
  using Scan = ChunkScan<Real, Work, TokensPerLane>;
  __shared__ typename Scan::Slab slab;
  __shared__ MaxMap maps[heads_per_block];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const auto chunks = static_cast<unsigned>(call.chunks_per_row);
  const unsigned cluster = blockIdx.x / chunks, x = blockIdx.x % chunks, groups = head_groups(call);
  Scan scan(call, slab, static_cast<std::int64_t>(cluster / groups) * chunks + x, cluster % groups);
  const Chunk chunk = chunk_at(call, scan.number);
  if (threadIdx.x == 0 && scan.first_head == 0) call.chunks[scan.number] = chunk;
  const MaxMap own = scan.whole(chunk);
  if (scan.lane == 0) maps[scan.warp] = own;
  arch::cluster_arrive();
  arch::cluster_wait();
  // Always composed in the same order, so that the end of a chunk is the start of the next one to the last bit.
  MaxMap map;
  if (scan.lane <= static_cast<int>(x)) {
    const MaxMap& there = maps[scan.warp];
    map = {arch::read_from_block(there.b, scan.lane), arch::read_from_block(there.top, scan.lane)};
  }
  __syncwarp();
  arch::cluster_arrive_relaxed();  // this block has read what it wants
#pragma unroll
  for (int offset = 1; offset < static_cast<int>(most_cluster_blocks); offset *= 2) {
    const MaxMap left = map.lane_before(offset);
    if (scan.lane >= offset) map = map.after(left);
  }
  if (scan.head < call.heads) {
    double m0 = 0;
    if (call.m0.data != nullptr)
      m0 = static_cast<const Real*>(call.m0.data)[chunk.sequence * call.m0.sequence + scan.head * call.m0.head];
    const int before = max(static_cast<int>(x) - 1, 0);
    const double m_end = max_state(call, m0, map.of_lane(static_cast<int>(x)));
    const ChunkEnds ends{x == 0 ? m0 : max_state(call, m0, map.of_lane(before)), m_end, own.b};
    if (scan.lane == 0) {
      call.b_last[scan.unit] = own.b;
      call.m_start[scan.unit] = ends.m_start;
      call.m_end[scan.unit] = ends.m_end;
      call.gbar[scan.unit] = static_cast<Real>(exp(own.b + ends.m_start - ends.m_end));
      if (x + 1 == chunks && call.m_last.data != nullptr)
        static_cast<Real*>(call.m_last.data)[chunk.sequence * call.m_last.sequence + scan.head * call.m_last.head] =
            static_cast<Real>(ends.m_end);
    }
    scan.visit(chunk.length, vector_writer(scan, chunk, ends));
  }
  __syncwarp();
  arch::cluster_wait();  // nobody reads from this block any more
}

template <class Work, int TokensPerLane, class Real>
void launch_gates_in(const Call<Real>& call, cudaStream_t stream) {
  const std::int64_t chunks = call.numbers * head_groups(call);
  if (runs_sm90_code() && call.cu_seqlens == nullptr && call.tokens > 0 && call.L <= TokensPerLane * warp_size &&
      call.chunks_per_row <= static_cast<int>(most_cluster_blocks))
    return launch_clusters("gates", gates_kernel<Real, Work, TokensPerLane>, static_cast<unsigned>(call.chunks_per_row),
                           chunks, chunk_threads, 0, stream, call);
  auto chunk_totals = chunk_totals_kernel<Real, Work, TokensPerLane, false>;
  if constexpr (std::is_same_v<Work, float>) {  // Hopper's kernels are for 16-bit tensors
    if (call.parts != nullptr && call.cu_seqlens != nullptr)
      chunk_totals = chunk_totals_kernel<Real, Work, TokensPerLane, true>;
  }
  launch_chained("chunk_totals", chunk_totals, chunks, chunk_threads, 0, stream, call);
  launch_chained("sequence_scan", sequence_scan_kernel<Real>, call.sequences * call.heads, scan_threads, 0, stream,
                 call);
  launch_chained("gate_vectors", gate_vectors_kernel<Real, Work, TokensPerLane>, chunks, chunk_threads, 0, stream,
                 call);
}

}  // namespace

template <class Real>
void launch_gates(const Call<Real>& call, cudaStream_t stream) {
  if (call.numbers == 0) return;
  if (!call.tensors_16_bit) return launch_gates_in<double, 4>(call, stream);
  if constexpr (std::is_same_v<Real, float>)
    call.L <= 2 * warp_size ? launch_gates_in<float, 2>(call, stream) : launch_gates_in<float, 4>(call, stream);
}

template void launch_gates(const Call<float>&, cudaStream_t);
template void launch_gates(const Call<double>&, cudaStream_t);

}  // namespace tfla::cuda
