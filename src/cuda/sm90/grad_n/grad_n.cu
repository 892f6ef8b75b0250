// grad_n: gradients of n: deta of every token, dn at the end of every chunk, and dn0.
//
// deta is dh.h, which row_dots makes, times the slope. Then dn <- gbar dn + sum_t scale qbar_t deta_t q_t in reverse
// time: one kernel makes the sums of all chunks, a second one scans them.
#include "cuda/arch/cluster.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/common/device.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/entry.h"

namespace tfla::cuda::sm90 {

namespace {

constexpr int threads = 256;
constexpr int wide = 8;  // numbers of 16 bits that a thread loads at a time

// One CTA for each chunk and head: deta, and the chunk's sum, which goes to where dn will be. column_tiles: in which
// row_dots leaves dh.h.
template <class T>
__global__ void __launch_bounds__(threads) grad_n_sums_kernel(Call<float> call, int column_tiles) {
  __shared__ float weights[chunk_tokens];
  __shared__ float sums[threads][wide + 1];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const unsigned unit = blockIdx.x;
  const Chunk chunk = call.packing.chunks[unit / call.dims.heads];
  const auto head = static_cast<int>(unit % call.dims.heads);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < chunk.length) {
    const std::int64_t at = call.dims.vector(chunk, head) + thread;
    float dh_h = 0;
    for (int tile = 0; tile < column_tiles; ++tile)
      dh_h += call.sums.rows[tile * call.dims.heads * call.dims.all_tokens() + at];
    const float deta = call.gates.slope[at] * dh_h;
    call.gates.deta[at] = deta;
    weights[thread] = static_cast<float>(call.rules.scale) * call.gates.qbar[at] * deta;
  }
  __syncthreads();
  const int columns = call.dims.dqk / wide, groups = threads / columns;
  const int column = thread % columns, group = thread / columns;
  float sum[wide]{};
  if (group < groups) {
#pragma unroll 4
    for (int t = group; t < chunk.length; t += groups) {
      const uint4 q =
          reinterpret_cast<const uint4*>(row_of<T>(call.tensors.q, chunk.batch, chunk.token + t, head))[column];
      const std::uint32_t pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 pair = arch::unpack(pairs[x], T{});
        sum[2 * x] = fmaf(weights[t], pair.x, sum[2 * x]);
        sum[2 * x + 1] = fmaf(weights[t], pair.y, sum[2 * x + 1]);
      }
    }
  }
#pragma unroll
  for (int x = 0; x < wide; ++x) sums[thread][x] = sum[x];
  __syncthreads();
  for (int r = thread; r < call.dims.dqk; r += threads) {
    float all = 0;
    for (int g = 0; g < groups; ++g) all += sums[g * columns + r / wide][r % wide];
    call.stored.dn[static_cast<std::int64_t>(unit) * call.dims.dqk + r] = all;
  }
}

// One CTA for each sequence and head, a thread for every row. has_sums: else dn comes from the last state alone.
__global__ void grad_n_scan_kernel(Call<float> call, bool has_sums) {
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const std::int64_t sequence = blockIdx.x / call.dims.heads;
  const auto head = static_cast<int>(blockIdx.x % call.dims.heads), r = static_cast<int>(threadIdx.x);
  if (r >= call.dims.dqk) return;
  const std::int64_t start = sequence_start(call, sequence);
  const int chunks = chunks_of(call, max(sequence_start(call, sequence + 1) - start, std::int64_t{0}));
  const std::int64_t first = first_chunk(call, sequence);
  const auto at_state = [&](const StridedState& state) -> float& {
    return static_cast<float*>(state.data)[sequence * state.sequence + head * state.head + r];
  };
  float dn = call.carried.dn_last.data != nullptr ? at_state(call.carried.dn_last) : 0;
  constexpr int ahead = 16;  // loads in flight
  for (int last = chunks - 1; last >= 0; last -= ahead) {
    float sums[ahead], decays[ahead];
#pragma unroll
    for (int x = 0; x < ahead; ++x) {
      const std::int64_t unit = (first + max(last - x, 0)) * call.dims.heads + head;
      sums[x] = has_sums ? call.stored.dn[unit * call.dims.dqk + r] : 0;
      decays[x] = call.gates.gbar[unit];
    }
#pragma unroll
    for (int x = 0; x < ahead; ++x) {
      if (last < x) break;
      call.stored.dn[((first + last - x) * call.dims.heads + head) * call.dims.dqk + r] = dn;
      dn = decays[x] * dn + sums[x];
    }
  }
  if (call.carried.dn0.data != nullptr) at_state(call.carried.dn0) = dn;
}

}  // namespace

template <class T>
void launch_grad_n(const Call<float>& call, cudaStream_t stream) {
  if (call.rules.exact) {
    launch_chained("grad_n_sums", grad_n_sums_kernel<T>, call.dims.chunk_count * call.dims.heads, threads, 0, stream,
                   call, (call.dims.dqk + Config<T>::width - 1) / Config<T>::width);
  }
  launch_chained("grad_n_scan", grad_n_scan_kernel, call.dims.sequences * call.dims.heads,
                 (call.dims.dqk + 31) / 32 * 32, 0, stream, call, call.rules.exact);
}

template void launch_grad_n<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_grad_n<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
