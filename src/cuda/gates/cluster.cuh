// Stage `gates` in one kernel, for dense batches of few chunks that fit a slab, on GPUs with clusters (sm_90 and
// newer). The CTAs of a row of the batch form a cluster. Each reads from the others what the chunks before its own do
// to the max state.
#pragma once

#include "cuda/device.h"
#include "cuda/gates/chunk_table.cuh"
#include "cuda/gates/token_blocks.cuh"

namespace tfla::cuda::gates {

template <int Chunks>
constexpr int most_cluster_chunks = static_cast<int>(most_cluster_blocks) * Chunks;

template <class Real, class Work, int Chunks, bool Blocks>
__global__ void __launch_bounds__(threads, resident_ctas<Work, false, Blocks>)
    gates_kernel(Call<Real> call, unsigned ctas) {
  using Scan = ChunkScan<Real, Work, Chunks>;
  __shared__ typename Scan::Shared shared;
  __shared__ MaxMap maps[gates::heads][Chunks];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const unsigned cluster = blockIdx.x / ctas, groups = head_groups(call);
  const int first = static_cast<int>(blockIdx.x % ctas) * Chunks;  // chunk in its row
  const std::int64_t row = static_cast<std::int64_t>(cluster / groups) * call.dims.chunks_per_row;
  Scan scan(call, shared, row + first, row + call.dims.chunks_per_row, cluster % groups,
            [&](std::int64_t number) { return chunk_at(call, number); });
  if (threadIdx.x < Chunks && scan.first_head == 0 && first + static_cast<int>(threadIdx.x) < call.dims.chunks_per_row)
    call.packing.chunks[scan.first_number + threadIdx.x] = shared.chunks[threadIdx.x];
  // The last max state may lie where the initial one does. All CTAs of the cluster have read that when they arrive, and
  // the last one is written after the wait.
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
  // Every CTA composes maps in the same order: the end of a chunk is the start of the next one to the last bit.
  MaxMap map;
  if (scan.lane < first + Chunks) {
    const MaxMap& there = maps[scan.warp][scan.lane % Chunks];
    const int cta = scan.lane / Chunks;
    map = {arch::read_from_cta(there.b, cta), arch::read_from_cta(there.top, cta)};
  }
#pragma unroll
  for (int offset = 1; offset < most_cluster_chunks<Chunks>; offset *= 2) {
    const MaxMap left = map.lane_before(offset);
    if (scan.lane >= offset) map = map.after(left);
  }
  const int x = first + scan.lane / Scan::lanes;
  const MaxMap before = map.of_lane(max(x - 1, 0)), up_to = map.of_lane(x);
  // This CTA has read what it needs. It arrives after the numbers are used: arriving does not wait for loads in flight,
  // and the CTA that they read from could have ended.
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
  arch::cluster_wait();  // nobody reads from this CTA any more
}

}  // namespace tfla::cuda::gates
