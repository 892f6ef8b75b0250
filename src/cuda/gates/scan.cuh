// The scan over gates inside a chunk, and what a chunk does to the max state. Sums are in double: those of log f reach
// the hundreds, and there are only T of them.
#pragma once

#include "cuda/common/runs.cuh"
#include "cuda/gates/cta.cuh"

namespace tfla::cuda::gates {

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

// The max state that such a map makes of m. It is rounded to the type in which states keep it: a state then says
// exactly what it was scaled by.
template <class Real>
__device__ double max_state(const Call<Real>& call, double m, const MaxMap& map) {
  return call.rules.family.has_max_state ? static_cast<double>(static_cast<Real>(map.b + fmax(m, map.top))) : 0.0;
}

// CTAs per multiprocessor. Several hide the time that each waits. Long: chunks may be longer than a slab. Blocks: with
// the vectors of token blocks.
template <class Work, bool Long, bool Blocks = false>
constexpr int resident_ctas = sizeof(Work) == 8 ? 2
                              : Long || Blocks  ? 3
                                                : 4;

// The scan at the neighbouring tokens of a lane.
struct LaneScan {
  double b[lane_tokens];    // sum of log f
  double c[lane_tokens];    // log i - b
  double top[lane_tokens];  // maximum of c, and of what the max state begins with at resets
};

// The gate scan of one chunk, in slabs, or of two chunks in one slab. Gates are read by tokens, as they lie in memory,
// and scanned by heads, a few neighbouring tokens to a lane: scans inside a lane cost far less than those over lanes.
template <class Real, class Work, int Chunks>
struct ChunkScan {
  static constexpr int lanes = warp_size / Chunks, length = slab_tokens / Chunks;  // a chunk's share of a slab
  struct Shared {
    Slab<Work> f, i;
    Chunk chunks[Chunks];
  };

  const Call<Real>& call;
  Shared& shared;
  std::int64_t first_number, number;  // of the CTA's first chunk, and of this lane's
  std::int64_t unit;                  // this lane's chunk and head
  int first_head, warp, lane, head;
  bool inside;  // that chunk and that head exist

  // chunk_of(number) is called once for each chunk of the CTA, which has none from `end` on.
  template <class ChunkOf>
  __device__ ChunkScan(const Call<Real>& of, Shared& memory, std::int64_t first, std::int64_t end, unsigned group,
                       const ChunkOf& chunk_of)
      : call(of), shared(memory), first_number(first), first_head(static_cast<int>(group * gates::heads)) {
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

  // Calls visit(t, scan) with this lane's tokens, t being the first of them in its chunk, and returns the map of the
  // whole chunk. All threads of the CTA take part; where a chunk or a head does not exist, maps change nothing.
  template <bool Long, class Visit>
  __device__ __forceinline__ MaxMap run(const Visit& visit) {
    static_assert(!Long || Chunks == 1);
    MaxMap all;
    for (int start = 0; start == 0 || (Long && start < shared.chunks[0].length); start += slab_tokens) {
      const int t = start + lane % lanes * lane_tokens;
      const unsigned own_resets = resets(call, chunk(), number, t);
      if (start > 0) __syncthreads();  // nobody reads the previous slab any more
      read(start);
      __syncthreads();
      LaneScan own;
      all = scan(all, own, own_resets);
      visit(t, own);
    }
    return all;
  }

 private:
  // All loads are in flight before the first is waited for.
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
      if (token(x) < chunk_of(x).length) take_logs(call.rules, f[x], i[x]);
      shared.f.of[mine.head][mine.place + x * step] = f[x];
      shared.i.of[mine.head][mine.place + x * step] = i[x];
    }
  }

  // own_resets: a bit for each of the lane's tokens.
  __device__ __forceinline__ MaxMap scan(const MaxMap& before, LaneScan& own, unsigned own_resets) {
    const int first = lane_tokens * lane;
    const auto resets_at = [&](int x) { return (own_resets >> x & 1) != 0; };
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x) {
      own.b[x] = static_cast<double>(shared.f.of[warp][first + x]) + (x > 0 ? own.b[x - 1] : 0);
      if (resets_at(x)) own.b[x] += reset_log_forget;
    }
    const double sum = warp_scan<lanes>(own.b[lane_tokens - 1], [](double x, double y) { return x + y; });
    const double sum_before = __shfl_up_sync(0xFFFFFFFFU, sum, 1, lanes);
    const double base = leads() ? before.b : before.b + sum_before;
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x) {
      own.b[x] += base;
      own.c[x] = static_cast<double>(shared.i.of[warp][first + x]) - own.b[x];
      own.top[x] = x > 0 ? fmax(own.top[x - 1], own.c[x]) : own.c[x];
      // The max state is 0 before the token: b - log f is what the sum of log f was there.
      if (resets_at(x)) own.top[x] = fmax(own.top[x], static_cast<double>(shared.f.of[warp][first + x]) - own.b[x]);
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

}  // namespace tfla::cuda::gates
