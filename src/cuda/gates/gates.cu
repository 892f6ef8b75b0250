// Stage `gates`: runs of short packed sequences, the chunk table and what each chunk does to the max state, the scan
// over chunks, and the vectors that every matrix kernel reads. In one kernel, or in three and one for runs.
#include "cuda/gates/cluster.cuh"
#include "cuda/gates/packed_list.cuh"
#include "cuda/gates/runs.cuh"
#include "cuda/launch.h"
#include "plan/cuda_scratch.h"

namespace tfla::cuda {

namespace gates {

namespace {

// The chunk table, b and top of every chunk and head, and zeros for tokens that are in no sequence.
template <class Real, class Work, int Chunks, bool Long>
__global__ void __launch_bounds__(threads, resident_ctas<Work, Long>) chunk_totals_kernel(Call<Real> call) {
  using Scan = ChunkScan<Real, Work, Chunks>;
  __shared__ typename Scan::Shared shared;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  Scan scan(call, shared, [&](std::int64_t number) { return chunk_at(call, number); });
  const MaxMap total = scan.template run<Long>([](int, const LaneScan&) {});
  if (threadIdx.x < Chunks && scan.first_head == 0 && scan.first_number + threadIdx.x < call.dims.chunk_count)
    call.packing.chunks[scan.first_number + threadIdx.x] = shared.chunks[threadIdx.x];
  if (call.packing.cu_seqlens != nullptr) clear_padding(call, blockIdx.x, gridDim.x);
  if (!scan.leads() || !scan.inside) return;
  call.gates.b_last[scan.unit] = total.b;
  call.gates.m_end[scan.unit] = total.top;  // until sequence_scan puts m there
}

constexpr int scan_threads = 512;

// The max state at every chunk start: `Warps` warps per sequence and head, a thread per chunk at a time. The CTA after
// those of the scan lists the segments of packed sequences.
template <class Real, int Warps>
__global__ void __launch_bounds__(scan_threads) sequence_scan_kernel(Call<Real> call, unsigned scan_ctas) {
  constexpr int own_threads = Warps * warp_size;
  __shared__ MaxMap warp_maps[scan_threads / warp_size];
  __shared__ double all_ends[scan_threads];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  if (blockIdx.x == scan_ctas) return list_segments<scan_threads>(call);
  const auto sync = [] { Warps == 1 ? __syncwarp() : __syncthreads(); };
  const unsigned unit = blockIdx.x * (scan_threads / own_threads) + threadIdx.x / own_threads;
  if (unit >= static_cast<unsigned>(call.dims.sequences * call.dims.heads)) return;  // whole warps
  const std::int64_t sequence = unit / static_cast<unsigned>(call.dims.heads);
  const int head = static_cast<int>(unit % static_cast<unsigned>(call.dims.heads));
  const int thread = static_cast<int>(threadIdx.x) % own_threads, warp = thread / warp_size;
  double* ends = all_ends + (static_cast<int>(threadIdx.x) - thread);
  const std::int64_t start = sequence_start(call, sequence);
  const int count = chunks_of(call, max(sequence_start(call, sequence + 1) - start, static_cast<std::int64_t>(0)));
  const std::int64_t first = first_chunk(call, sequence);
  double m = 0;
  if (call.carried.m0.data != nullptr) {
    const std::int64_t at = sequence * call.carried.m0.sequence + head * call.carried.m0.head;
    m = finite_max_state(static_cast<const Real*>(call.carried.m0.data)[at]);
  }
  for (int base = 0; base < count; base += own_threads) {
    const int x = base + thread;
    const std::int64_t chunk = (first + x) * call.dims.heads + head;
    MaxMap own, map;
    if (x < count) map = own = {call.gates.b_last[chunk], call.gates.m_end[chunk]};
#pragma unroll
    for (int offset = 1; offset < warp_size; offset *= 2) {
      const MaxMap before = map.lane_before(offset);
      if (thread % warp_size >= offset) map = map.after(before);
    }
    if constexpr (Warps > 1) {
      if (thread % warp_size == warp_size - 1) warp_maps[warp] = map;
      __syncthreads();
      for (int w = warp - 1; w >= 0; --w) map = map.after(warp_maps[w]);
    }
    const double end = max_state(call, m, map);  // m after chunk x
    ends[thread] = end;
    sync();
    if (x < count) {
      const double begin = thread == 0 ? m : ends[thread - 1];
      call.gates.m_start[chunk] = begin;
      call.gates.m_end[chunk] = end;
      call.gates.gbar[chunk] = static_cast<Real>(exp(own.b + begin - end));
    }
    m = ends[min(own_threads, count - base) - 1];
    sync();  // before the next round writes there
  }
  if (thread == 0 && call.carried.m_last.data != nullptr) {
    const std::int64_t at = sequence * call.carried.m_last.sequence + head * call.carried.m_last.head;
    static_cast<Real*>(call.carried.m_last.data)[at] = static_cast<Real>(m);
  }
}

// The vectors that matrix kernels read. The scan inside the chunk is done again: keeping it would take 24 bytes of
// scratch per token and head.
template <class Real, class Work, int Chunks, bool Long, bool Blocks>
__global__ void __launch_bounds__(threads, resident_ctas<Work, Long, Blocks>) gate_vectors_kernel(Call<Real> call) {
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

// Sequences of a few chunks have a warp each, others a CTA.
template <class Real>
void launch_sequence_scan(const Call<Real>& call, cudaStream_t stream) {
  constexpr std::int64_t few_chunks = 12, warps = scan_threads / warp_size;
  const std::int64_t units = call.dims.sequences * call.dims.heads;
  const bool by_warps = call.dims.chunk_count <= few_chunks * call.dims.sequences;
  const std::int64_t ctas = by_warps ? (units + warps - 1) / warps : units;
  const bool lists = call.packing.segments != nullptr && call.packing.cu_seqlens != nullptr;
  launch_chained("sequence_scan", by_warps ? sequence_scan_kernel<Real, 1> : sequence_scan_kernel<Real, warps>,
                 ctas + (lists ? 1 : 0), scan_threads, 0, stream, call, static_cast<unsigned>(ctas));
}

template <class Real>
void launch_runs(const Call<Real>& call, cudaStream_t stream) {
  const std::int64_t bits = warp_size * first_token_words(call.dims.tokens);
  launch_chained("runs", runs_kernel<Real>, (bits + threads - 1) / threads, threads, 0, stream, call);
}

template <class Work, int Chunks, bool Long, bool Blocks, class Real>
void launch_gates_in(const Call<Real>& call, bool by_clusters, cudaStream_t stream) {
  const auto ctas_of = [](std::int64_t chunks) { return (chunks + Chunks - 1) / Chunks; };
  if constexpr (!Long) {
    if (by_clusters) {
      const auto cluster = static_cast<unsigned>(ctas_of(call.dims.chunks_per_row));
      return launch_clusters("gates", gates_kernel<Real, Work, Chunks, Blocks>, cluster,
                             call.dims.batch * head_groups(call) * cluster, threads, 0, stream, call, cluster);
    }
  }
  const std::int64_t ctas = ctas_of(call.dims.chunk_count) * head_groups(call);
  launch_chained("chunk_totals", chunk_totals_kernel<Real, Work, Chunks, Long>, ctas, threads, 0, stream, call);
  launch_sequence_scan(call, stream);
  launch_chained("gate_vectors", gate_vectors_kernel<Real, Work, Chunks, Long, Blocks>, ctas, threads, 0, stream, call);
}

// Two chunks to a CTA are for 16-bit tensors alone, whose calls are the fastest.
template <class Work, class Real>
void launch_gates_as(const Call<Real>& call, bool by_clusters, cudaStream_t stream) {
  if (call.dims.L > slab_tokens) return launch_gates_in<Work, 1, true, false>(call, by_clusters, stream);
  if constexpr (std::is_same_v<Work, float>) {
    if (2 * call.dims.L <= slab_tokens) return launch_gates_in<Work, 2, false, false>(call, by_clusters, stream);
    if (call.gates.block_u != nullptr) return launch_gates_in<Work, 1, false, true>(call, by_clusters, stream);
  }
  launch_gates_in<Work, 1, false, false>(call, by_clusters, stream);
}

}  // namespace

}  // namespace gates

template <class Real>
void launch_gates(const Call<Real>& call, bool by_clusters, cudaStream_t stream) {
  if (call.dims.chunk_count == 0) return;
  if (call.runs.starts != nullptr) gates::launch_runs(call, stream);
  if (!call.rules.tensors_16_bit) return gates::launch_gates_as<double>(call, by_clusters, stream);
  if constexpr (std::is_same_v<Real, float>) gates::launch_gates_as<float>(call, by_clusters, stream);
}

template void launch_gates(const Call<float>&, bool, cudaStream_t);
template void launch_gates(const Call<double>&, bool, cudaStream_t);

}  // namespace tfla::cuda
