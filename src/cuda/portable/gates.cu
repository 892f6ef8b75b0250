// Stage `gates`: chunk table and what each chunk does to the max state, the scan over chunks, and the vectors every
// matrix kernel reads. In one kernel or in three.
// Sums in double: those of log f reach the hundreds, and there are only T of them.
#include "cuda/launch.h"
#include "cuda/portable/gate_block.cuh"

namespace tfla::cuda {

namespace {

// The segments of one sequence, listed by a warp. Bad boundaries, which the host cannot see, do not lead out of the
// list.
template <class Real>
__device__ void list_parts(const Call<Real>& call, int sequence) {
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
  const auto most = static_cast<unsigned>(call.dims.most_packed_segments());
  const auto list = [&](unsigned place, unsigned segment) {
    if (place < most)
      call.packing.segments[1 + place] = {sequence, static_cast<int>(segment), start, static_cast<int>(own)};
  };
  for (unsigned segment = lane; segment < own_followed; segment += warp_size) list(before + segment, segment);
  if (lane != 0) return;
  list(all + rank, own_followed);
  if (sequence != 0) return;
  const auto parts = static_cast<unsigned>(call.dims.sequences) + all;
  call.packing.segments[0] = {static_cast<int>(min(parts, most)), static_cast<int>(min(all, most)), 0, 0};
}

template <class Real>
__device__ Chunk chunk_at(const Call<Real>& call, std::int64_t number) {
  std::int64_t low = 0, high = call.dims.sequences;  // the owner is in [low, high)
  if (call.dims.chunks_per_row > 0) {
    low =
        static_cast<unsigned>(number) / static_cast<unsigned>(call.dims.chunks_per_row);  // 64 bits take long to divide
    high = low + 1;
  }
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first_chunk(call, middle) <= number ? low : high) = middle;
  }
  const std::int64_t start = sequence_start(call, low);
  const std::int64_t length = max(sequence_start(call, low + 1) - start, static_cast<std::int64_t>(0));
  const std::int64_t first = first_chunk(call, low);
  const std::int64_t begin = (number - first) * call.dims.L;
  const bool dense = call.packing.cu_seqlens == nullptr;
  return {.token = dense ? begin : start + begin,
          .packed = start + begin,
          .batch = dense ? static_cast<int>(low) : 0,
          .sequence = static_cast<int>(low),
          .length = static_cast<int>(
              max(static_cast<std::int64_t>(0), min(static_cast<std::int64_t>(call.dims.L), length - begin))),
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
  return call.rules.exponential ? static_cast<double>(static_cast<Real>(map.b + fmax(m, map.top))) : 0.0;
}

using namespace gate_block;

// On a multiprocessor: mostly they wait. Long: chunks may be longer than a slab. Blocks: see Call::block_u.
template <class Work, bool Long, bool Blocks = false>
constexpr int chunk_blocks = sizeof(Work) == 8 ? 2
                             : Long || Blocks  ? 3
                                               : 4;

// Of neighbouring tokens: the sum of log f up to each, log i minus that, and the running maximum of that.
struct LaneScan {
  double b[lane_tokens], c[lane_tokens], top[lane_tokens];
};

// The gate scan of one chunk, in slabs, or of two in one slab. Gates are read by tokens, as they lie in memory, and
// scanned by heads, a few neighbouring tokens to a lane: scans inside a lane cost far less than those over lanes.
template <class Real, class Work, int Chunks>
struct ChunkScan {
  static constexpr int lanes = warp_size / Chunks, length = slab_tokens / Chunks;  // of a chunk, in a slab
  struct Shared {
    Slab<Work> f, i;
    Chunk chunks[Chunks];
  };

  const Call<Real>& call;
  Shared& shared;
  std::int64_t first_number, number, unit;  // of the block's first chunk; of this lane's chunk, and with its head
  int first_head, warp, lane, head;
  bool inside;  // there are such a chunk and such a head

  // chunk_of(number): called once for each chunk of the block. There are none from `end` on.
  template <class ChunkOf>
  __device__ ChunkScan(const Call<Real>& of, Shared& memory, std::int64_t first, std::int64_t end, unsigned group,
                       const ChunkOf& chunk_of)
      : call(of), shared(memory), first_number(first), first_head(static_cast<int>(group * gate_block::heads)) {
    warp = static_cast<int>(threadIdx.x) / warp_size;
    lane = static_cast<int>(threadIdx.x) % warp_size;
    head = first_head + warp;
    number = first + lane / lanes;
    unit = number * call.dims.heads + head;
    inside = number < end && head < call.dims.heads;
    if (threadIdx.x < Chunks)
      shared.chunks[threadIdx.x] = first + threadIdx.x < end ? chunk_of(first + threadIdx.x) : Chunk{};
    __syncthreads();
  }
  template <class ChunkOf>
  __device__ ChunkScan(const Call<Real>& of, Shared& memory, const ChunkOf& chunk_of)
      : ChunkScan(of, memory, static_cast<std::int64_t>(blockIdx.x / head_groups(of)) * Chunks, of.dims.chunk_count,
                  blockIdx.x % head_groups(of), chunk_of) {}

  [[nodiscard]] __device__ const Chunk& chunk() const { return shared.chunks[lane / lanes]; }
  [[nodiscard]] __device__ bool leads() const { return lane % lanes == 0; }

  // visit(t, scan): of this lane's tokens, t being the first of them, in its chunk. Returns the map of the whole chunk.
  // By all threads of a block; where there is no chunk or head, maps change nothing.
  template <bool Long, class Visit>
  __device__ __forceinline__ MaxMap run(const Visit& visit) {
    static_assert(!Long || Chunks == 1);
    MaxMap all;
    for (int start = 0; start == 0 || (Long && start < shared.chunks[0].length); start += slab_tokens) {
      if (start > 0) __syncthreads();  // the slab before is done with
      read(start);
      __syncthreads();
      LaneScan own;
      all = scan(all, own);
      visit(start + lane % lanes * lane_tokens, own);
    }
    return all;
  }

 private:
  // All loads go out before the first is waited for.
  __device__ __forceinline__ void read(int start) {
    constexpr int step = ByTokens::step, rounds = ByTokens::rounds;
    static_assert(length % step == 0, "tokens of a round are of one chunk");
    const ByTokens mine;
    const int own_head = first_head + mine.head;
    const auto chunk_of = [&](int x) -> const Chunk& { return shared.chunks[x * step / length]; };
    const auto token = [&](int x) { return start + mine.place + x * step % length; };
    Work f[rounds], i[rounds];
    const auto load = [&](const Strided& gate, GateType type, Work beyond, Work(&to)[rounds]) {
      with_gate(gate, type, [&](const auto* data) {
#pragma unroll
        for (int x = 0; x < rounds; ++x) {
          const Chunk& chunk = chunk_of(x);
          to[x] = beyond;
          if (token(x) < chunk.length && own_head < call.dims.heads)
            to[x] = gate_as<Work>(data[gate_at(gate, chunk.batch, chunk.token + token(x), own_head)]);
        }
      });
    };
    load(call.tensors.f, call.rules.f_type, Work{0}, f);
    load(call.tensors.i, call.rules.i_type, -INFINITY, i);
#pragma unroll
    for (int x = 0; x < rounds; ++x) {
      if (token(x) < chunk_of(x).length) take_logs(call, f[x], i[x]);
      shared.f.of[mine.head][mine.place + x * step] = f[x];
      shared.i.of[mine.head][mine.place + x * step] = i[x];
    }
  }

  __device__ __forceinline__ MaxMap scan(const MaxMap& before, LaneScan& own) {
    const int first = lane_tokens * lane;
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x)
      own.b[x] = static_cast<double>(shared.f.of[warp][first + x]) + (x > 0 ? own.b[x - 1] : 0);
    const double sum = warp_scan<lanes>(own.b[lane_tokens - 1], [](double x, double y) { return x + y; });
    const double sum_before = __shfl_up_sync(0xFFFFFFFFU, sum, 1, lanes);
    const double base = leads() ? before.b : before.b + sum_before;
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x) {
      own.b[x] += base;
      own.c[x] = static_cast<double>(shared.i.of[warp][first + x]) - own.b[x];
      own.top[x] = x > 0 ? fmax(own.top[x - 1], own.c[x]) : own.c[x];
    }
    const double highest = warp_scan<lanes>(own.top[lane_tokens - 1], [](double x, double y) { return fmax(x, y); });
    const double highest_before = __shfl_up_sync(0xFFFFFFFFU, highest, 1, lanes);
    const double floor = leads() ? before.top : fmax(before.top, highest_before);
#pragma unroll
    for (double& top : own.top) top = fmax(top, floor);
    return {__shfl_sync(0xFFFFFFFFU, own.b[lane_tokens - 1], lanes - 1, lanes),
            __shfl_sync(0xFFFFFFFFU, own.top[lane_tokens - 1], lanes - 1, lanes)};
  }
};

// exp(x). float32 work has no use for all digits of a double's: with it gate_vectors took 35 us instead of 22 (H200).
__device__ double exponential(double x, double /*as*/) { return exp(x); }
__device__ float exponential(double x, float /*as*/) {
  float2 parts;
  as_exponent(x, parts);
  return exp2f(parts.x) * (1 + static_cast<float>(1 / log2_e) * parts.y);
}

// The max state before and after a chunk, and the sum of its log f.
struct ChunkEnds {
  double m_start, m_end, b_last;
};

// x of neighbouring tokens, in pieces of 16 bytes where they begin on one.
template <class V, class ValueOf>
__device__ __forceinline__ void write_tokens(V* to, int tokens, bool whole, const ValueOf& value_of) {
  V x[lane_tokens];
#pragma unroll
  for (int t = 0; t < lane_tokens; ++t) x[t] = value_of(t);
  constexpr int pieces = static_cast<int>(sizeof(x) / sizeof(float4));
  if (whole) {
    float4 piece[pieces];
    memcpy(piece, x, sizeof(x));
#pragma unroll
    for (int p = 0; p < pieces; ++p) reinterpret_cast<float4*>(to)[p] = piece[p];
    return;
  }
#pragma unroll
  for (int t = 0; t < lane_tokens; ++t)
    if (t < tokens) to[t] = x[t];
}

// What matrix kernels read of some neighbouring tokens, by where their vectors begin.
template <class Real>
__device__ __forceinline__ void write_vectors(const Call<Real>& call, std::int64_t at, int tokens,
                                              const ChunkEnds& ends, const LaneScan& scan) {
  using Log = Log<Real>;
  if (tokens <= 0) return;
  const bool whole = tokens >= lane_tokens && at % lane_tokens == 0;
  const auto write = [&](auto* to, const auto& value_of) { write_tokens(to + at, tokens, whole, value_of); };
  const auto exponent = [](double x) {
    Log log;
    as_exponent(x, log);
    return log;
  };
  double u[lane_tokens];  // b - m, but not as that difference: it rounds
#pragma unroll
  for (int t = 0; t < lane_tokens; ++t) u[t] = call.rules.exponential ? -fmax(ends.m_start, scan.top[t]) : scan.b[t];
  write(call.gates.u, [&](int t) { return exponent(u[t]); });
  write(call.gates.log_c, [&](int t) { return exponent(scan.c[t]); });
  write(call.gates.qbar, [&](int t) { return exponential(u[t] + ends.m_start, Real{}); });
  write(call.gates.abar, [&](int t) { return exponential(ends.b_last + scan.c[t] - ends.m_end, Real{}); });
  // Backward has them from forward, or makes them. Forward may have nobody to keep them for.
  if (!call.rules.normalized && call.tensors.h.data != nullptr && call.gates.inverse != nullptr) {
    write(call.gates.inverse, [](int) { return Real{1}; });
    write(call.gates.slope, [](int) { return Real{0}; });
  }
  if (call.rules.normalized && call.gates.floor != nullptr)
    write(call.gates.floor, [&](int t) { return exponential(u[t] - scan.b[t], Real{}); });
  if (call.gates.c != nullptr) write(call.gates.c, [&](int t) { return scan.c[t]; });
}

static_assert(slab_tokens == 2 * token_block, "the blocks of a chunk are in one slab");

// Where the two blocks of a chunk meet: the sum of log f up to there, and the max state, in whose scale nothing is
// stored. Of a short chunk its end. By all lanes of a warp.
struct Middle {
  double b, m;
};
template <class Real>
__device__ __forceinline__ Middle middle_of(const Call<Real>& call, int length, const ChunkEnds& ends,
                                            const LaneScan& scan) {
  constexpr int last_lane = token_block / lane_tokens - 1;  // of the first block
  const double b = __shfl_sync(0xFFFFFFFFU, scan.b[lane_tokens - 1], last_lane);
  const double top = __shfl_sync(0xFFFFFFFFU, scan.top[lane_tokens - 1], last_lane);
  if (length <= token_block) return {ends.b_last, ends.m_end};
  return {b, call.rules.exponential ? b + fmax(ends.m_start, top) : 0.0};
}

// Of the first of a chunk's two blocks, counted as chunks of their size would be.
template <class Real>
__device__ std::int64_t block_number(const Call<Real>& call, const Chunk& chunk, std::int64_t number) {
  const std::int64_t before = number - chunk.first;  // chunks of the sequence
  const std::int64_t first = call.packing.cu_seqlens == nullptr
                                 ? chunk.sequence * ((call.dims.tokens + token_block - 1) / token_block)
                                 : (chunk.packed - before * call.dims.L) / token_block + chunk.sequence;
  return first + 2 * before;
}

// What Hopper's reverse-time kernel reads of some neighbouring tokens, from token t of a chunk on. at: where their
// vectors begin.
template <class Scan>
__device__ __forceinline__ void write_block_vectors(const Scan& scan, const Chunk& chunk, std::int64_t at, int t,
                                                    const ChunkEnds& ends, const LaneScan& own) {
  const Call<float>& call = scan.call;
  const Middle middle = middle_of(call, chunk.length, ends, own);
  const int tokens = chunk.length - t;
  if (tokens <= 0) return;
  const bool whole = tokens >= lane_tokens && at % lane_tokens == 0, later = t >= token_block;
  const auto write = [&](auto* to, const auto& value_of) { write_tokens(to + at, tokens, whole, value_of); };
  double u[lane_tokens];
  float row[lane_tokens];  // scale / den
#pragma unroll
  for (int x = 0; x < lane_tokens; ++x) {
    u[x] = call.rules.exponential ? -fmax(ends.m_start, own.top[x]) : own.b[x];
    row[x] = static_cast<float>(call.rules.scale) * call.gates.inverse[at + min(x, tokens - 1)];
  }
  write(call.gates.block_u, [&](int x) {
    float2 exponent;
    as_exponent(u[x], exponent);
    exponent.y += log2f(row[x]);
    return exponent;
  });
  // From the start of the token's block, and to its end.
  const double from = later ? middle.m - middle.b : ends.m_start;
  const double to = later ? ends.b_last - ends.m_end : middle.b - middle.m;
  write(call.gates.block_qbar, [&](int x) { return row[x] * exponential(u[x] + from, 0.0F); });
  write(call.gates.block_abar, [&](int x) { return exponential(own.c[x] + to, 0.0F); });
  if (t % token_block > 0) return;
  const std::int64_t block = block_number(call, chunk, scan.number) + (later ? 1 : 0);
  call.gates.block_gbar[block * call.dims.heads + scan.head] = exponential(from + to, 0.0F);
}

// The chunk table, b and top of every chunk and head, the list of segments of packed sequences, and zeros where there
// are none.
template <class Real, class Work, int Chunks, bool Long, bool Lists>
__global__ void __launch_bounds__(threads, chunk_blocks<Work, Long>) chunk_totals_kernel(Call<Real> call) {
  using Scan = ChunkScan<Real, Work, Chunks>;
  __shared__ typename Scan::Shared shared;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  Scan scan(call, shared, [&](std::int64_t number) { return chunk_at(call, number); });
  const MaxMap total = scan.template run<Long>([](int, const LaneScan&) {});
  if (scan.first_head == 0 && scan.warp < Chunks) {
    const std::int64_t number = scan.first_number + scan.warp;
    if (scan.lane == 0 && number < call.dims.chunk_count) call.packing.chunks[number] = shared.chunks[scan.warp];
    if (Lists && number < call.dims.sequences) list_parts(call, static_cast<int>(number));
  }
  if (call.packing.cu_seqlens != nullptr) clear_padding(call, blockIdx.x, gridDim.x);
  if (!scan.leads() || !scan.inside) return;
  call.gates.b_last[scan.unit] = total.b;
  call.gates.m_end[scan.unit] = total.top;  // until sequence_scan puts m there
}

constexpr int scan_threads = 512;

// The max state at every chunk start: one block per sequence and head, one thread per chunk at a time.
template <class Real>
__global__ void __launch_bounds__(scan_threads) sequence_scan_kernel(Call<Real> call) {
  __shared__ MaxMap warp_maps[scan_threads / warp_size];
  __shared__ double ends[scan_threads];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const std::int64_t sequence = blockIdx.x / call.dims.heads;
  const int head = static_cast<int>(blockIdx.x % call.dims.heads);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size;
  const std::int64_t start = sequence_start(call, sequence);
  const int count = chunks_of(call, max(sequence_start(call, sequence + 1) - start, static_cast<std::int64_t>(0)));
  const std::int64_t first = first_chunk(call, sequence);
  double m = 0;
  if (call.carried.m0.data != nullptr) {
    const std::int64_t at = sequence * call.carried.m0.sequence + head * call.carried.m0.head;
    m = finite_max_state(static_cast<const Real*>(call.carried.m0.data)[at]);
  }
  for (int base = 0; base < count; base += scan_threads) {
    const int x = base + thread;
    const std::int64_t unit = (first + x) * call.dims.heads + head;
    MaxMap own, map;
    if (x < count) map = own = {call.gates.b_last[unit], call.gates.m_end[unit]};
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
      call.gates.m_start[unit] = begin;
      call.gates.m_end[unit] = end;
      call.gates.gbar[unit] = static_cast<Real>(exp(own.b + begin - end));
    }
    m = ends[min(scan_threads, count - base) - 1];
    __syncthreads();  // before the next round writes there
  }
  if (thread == 0 && call.carried.m_last.data != nullptr) {
    const std::int64_t at = sequence * call.carried.m_last.sequence + head * call.carried.m_last.head;
    static_cast<Real*>(call.carried.m_last.data)[at] = static_cast<Real>(m);
  }
}

// The vectors that matrix kernels read. The scan inside the chunk is done again rather than kept, which would take
// 24 bytes of scratch per token and head.
template <class Real, class Work, int Chunks, bool Long, bool Blocks>
__global__ void __launch_bounds__(threads, chunk_blocks<Work, Long, Blocks>) gate_vectors_kernel(Call<Real> call) {
  using Scan = ChunkScan<Real, Work, Chunks>;
  __shared__ typename Scan::Shared shared;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  Scan scan(call, shared, [&](std::int64_t number) { return call.packing.chunks[number]; });
  ChunkEnds ends{};
  if (scan.inside) ends = {call.gates.m_start[scan.unit], call.gates.m_end[scan.unit], call.gates.b_last[scan.unit]};
  const std::int64_t at = call.dims.vector(scan.chunk(), scan.head);
  const int tokens = scan.inside ? scan.chunk().length : 0;
  scan.template run<Long>([&](int t, const LaneScan& own) {
    write_vectors(call, at + t, tokens - t, ends, own);
    if constexpr (Blocks) {
      if (scan.inside) write_block_vectors(scan, scan.chunk(), at + t, t, ends, own);
    }
  });
}

// All three in one kernel, for dense batches of few chunks that fit a slab. The blocks of a row are a cluster, and each
// reads what the chunks before its own do to the max state from their blocks. Not for GPUs without clusters.
template <int Chunks>
constexpr int most_cluster_chunks = static_cast<int>(most_cluster_blocks) * Chunks;

template <class Real, class Work, int Chunks, bool Blocks>
__global__ void __launch_bounds__(threads, chunk_blocks<Work, false, Blocks>)
    gates_kernel(Call<Real> call, unsigned blocks) {
  using Scan = ChunkScan<Real, Work, Chunks>;
  __shared__ typename Scan::Shared shared;
  __shared__ MaxMap maps[gate_block::heads][Chunks];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const unsigned cluster = blockIdx.x / blocks, groups = head_groups(call);
  const int first = static_cast<int>(blockIdx.x % blocks) * Chunks;  // chunk in its row
  const std::int64_t row = static_cast<std::int64_t>(cluster / groups) * call.dims.chunks_per_row;
  Scan scan(call, shared, row + first, row + call.dims.chunks_per_row, cluster % groups,
            [&](std::int64_t number) { return chunk_at(call, number); });
  if (threadIdx.x < Chunks && scan.first_head == 0 && first + static_cast<int>(threadIdx.x) < call.dims.chunks_per_row)
    call.packing.chunks[scan.first_number + threadIdx.x] = shared.chunks[threadIdx.x];
  // The last max state may lie where the initial one does: all blocks of the cluster have read that when they arrive,
  // and it is written behind their wait.
  Real m0 = 0;
  if (scan.inside && call.carried.m0.data != nullptr)
    m0 = finite_max_state(static_cast<const Real*>(
        call.carried.m0.data)[scan.chunk().sequence * call.carried.m0.sequence + scan.head * call.carried.m0.head]);
  LaneScan own;
  const MaxMap own_map = scan.template run<false>([&](int, const LaneScan& lane_scan) { own = lane_scan; });
  if (scan.leads()) maps[scan.warp][scan.lane / Scan::lanes] = own_map;
  __syncwarp();
  arch::cluster_arrive();
  arch::cluster_wait();
  // Always composed in the same order, so that the end of a chunk is the start of the next one to the last bit.
  MaxMap map;
  if (scan.lane < first + Chunks) {
    const MaxMap& there = maps[scan.warp][scan.lane % Chunks];
    const int block = scan.lane / Chunks;
    map = {arch::read_from_block(there.b, block), arch::read_from_block(there.top, block)};
  }
#pragma unroll
  for (int offset = 1; offset < most_cluster_chunks<Chunks>; offset *= 2) {
    const MaxMap left = map.lane_before(offset);
    if (scan.lane >= offset) map = map.after(left);
  }
  const int x = first + scan.lane / Scan::lanes;
  const MaxMap before = map.of_lane(max(x - 1, 0)), up_to = map.of_lane(x);
  // This block has read what it wants. Not before the numbers are used: arriving does not wait for loads under way, and
  // the block they read from could be gone.
  arch::cluster_arrive_relaxed();
  if (scan.inside) {
    const Chunk& chunk = scan.chunk();
    const ChunkEnds ends{x == 0 ? m0 : max_state(call, m0, before), max_state(call, m0, up_to), own_map.b};
    if (scan.leads()) {
      call.gates.b_last[scan.unit] = own_map.b;
      call.gates.m_start[scan.unit] = ends.m_start;
      call.gates.m_end[scan.unit] = ends.m_end;
      call.gates.gbar[scan.unit] = static_cast<Real>(exp(own_map.b + ends.m_start - ends.m_end));
      if (x + 1 == call.dims.chunks_per_row && call.carried.m_last.data != nullptr)
        static_cast<Real*>(call.carried.m_last.data)[chunk.sequence * call.carried.m_last.sequence +
                                                     scan.head * call.carried.m_last.head] =
            static_cast<Real>(ends.m_end);
    }
    const int t = scan.lane % Scan::lanes * lane_tokens;
    const std::int64_t at = call.dims.vector(chunk, scan.head) + t;
    write_vectors(call, at, chunk.length - t, ends, own);
    if constexpr (Blocks) write_block_vectors(scan, chunk, at, t, ends, own);
  }
  __syncwarp();
  arch::cluster_wait();  // nobody reads from this block any more
}

template <class Work, int Chunks, bool Long, bool Blocks, class Real>
void launch_gates_in(const Call<Real>& call, cudaStream_t stream) {
  const auto blocks_of = [](std::int64_t chunks) { return (chunks + Chunks - 1) / Chunks; };
  if constexpr (!Long) {
    if (runs_sm90_code() && call.packing.cu_seqlens == nullptr && call.dims.tokens > 0 &&
        call.dims.chunks_per_row <= most_cluster_chunks<Chunks>) {
      const auto blocks = static_cast<unsigned>(blocks_of(call.dims.chunks_per_row));
      return launch_clusters("gates", gates_kernel<Real, Work, Chunks, Blocks>, blocks,
                             call.dims.batch * head_groups(call) * blocks, threads, 0, stream, call, blocks);
    }
  }
  const std::int64_t blocks = blocks_of(call.dims.chunk_count) * head_groups(call);
  auto chunk_totals = chunk_totals_kernel<Real, Work, Chunks, Long, false>;
  if constexpr (std::is_same_v<Work, float> && !Long) {  // Hopper's kernels are for 16-bit tensors, in short chunks
    if (call.packing.segments != nullptr && call.packing.cu_seqlens != nullptr)
      chunk_totals = chunk_totals_kernel<Real, Work, Chunks, Long, true>;
  }
  launch_chained("chunk_totals", chunk_totals, blocks, threads, 0, stream, call);
  launch_chained("sequence_scan", sequence_scan_kernel<Real>, call.dims.sequences * call.dims.heads, scan_threads, 0,
                 stream, call);
  launch_chained("gate_vectors", gate_vectors_kernel<Real, Work, Chunks, Long, Blocks>, blocks, threads, 0, stream,
                 call);
}

// Two chunks to a block of 16-bit tensors alone, whose calls are the fastest.
template <class Work, class Real>
void launch_gates_as(const Call<Real>& call, cudaStream_t stream) {
  if (call.dims.L > slab_tokens) return launch_gates_in<Work, 1, true, false>(call, stream);
  if constexpr (std::is_same_v<Work, float>) {
    if (2 * call.dims.L <= slab_tokens) return launch_gates_in<Work, 2, false, false>(call, stream);
    if (call.gates.block_u != nullptr) return launch_gates_in<Work, 1, false, true>(call, stream);
  }
  launch_gates_in<Work, 1, false, false>(call, stream);
}

}  // namespace

template <class Real>
void launch_gates(const Call<Real>& call, cudaStream_t stream) {
  if (call.dims.chunk_count == 0) return;
  if (!call.rules.tensors_16_bit) return launch_gates_as<double>(call, stream);
  if constexpr (std::is_same_v<Real, float>) launch_gates_as<float>(call, stream);
}

template void launch_gates(const Call<float>&, cudaStream_t);
template void launch_gates(const Call<double>&, cudaStream_t);

}  // namespace tfla::cuda
