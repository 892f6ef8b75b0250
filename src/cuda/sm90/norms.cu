// Gradients of n on Hopper: deta of every token, dn at the end of every chunk, and dn0.
//
// deta is dh.h (stage `rows`) times the slope. Then dn <- gbar dn + sum_t scale qbar_t deta_t q_t in reverse time: the
// sums of all chunks side by side, and a scan.
#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/portable/device.cuh"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90 {

namespace {

constexpr int threads = 256;
constexpr int wide = 8;  // numbers of 16 bits that a thread loads at a time

// One block for each chunk and head: deta, and its sum, which goes to where dn will be.
template <class T>
__global__ void __launch_bounds__(threads) norm_sums_kernel(Call<float> call, int parts) {
  __shared__ float weights[stored_chunk];
  __shared__ float sums[threads][wide + 1];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const unsigned unit = blockIdx.x;
  const Chunk chunk = call.chunks[unit / call.heads];
  const auto head = static_cast<int>(unit % call.heads);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < chunk.length) {
    const std::int64_t at = call.vector(chunk, head) + thread;
    float dh_h = 0;
    for (int part = 0; part < parts; ++part) dh_h += call.row_sums[part * call.heads * call.all_tokens() + at];
    const float deta = call.slope[at] * dh_h;
    call.deta[at] = deta;
    weights[thread] = static_cast<float>(call.scale) * call.qbar[at] * deta;
  }
  __syncthreads();
  const int columns = call.dqk / wide, groups = threads / columns;
  const int column = thread % columns, group = thread / columns;
  float sum[wide]{};
  if (group < groups) {
#pragma unroll 4
    for (int t = group; t < chunk.length; t += groups) {
      const uint4 q = reinterpret_cast<const uint4*>(row_of<T>(call.q, chunk.batch, chunk.token + t, head))[column];
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
  for (int r = thread; r < call.dqk; r += threads) {
    float all = 0;
    for (int g = 0; g < groups; ++g) all += sums[g * columns + r / wide][r % wide];
    call.dn_states[static_cast<std::int64_t>(unit) * call.dqk + r] = all;
  }
}

// One block for each sequence and head, a thread for every row. has_sums: else dn comes from the last state alone.
__global__ void norm_scan_kernel(Call<float> call, bool has_sums) {
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const std::int64_t sequence = blockIdx.x / call.heads;
  const auto head = static_cast<int>(blockIdx.x % call.heads), r = static_cast<int>(threadIdx.x);
  if (r >= call.dqk) return;
  const std::int64_t start = sequence_start(call, sequence);
  const int chunks = chunks_of(call, max(sequence_start(call, sequence + 1) - start, std::int64_t{0}));
  const std::int64_t first = first_chunk(call, sequence);
  const auto at_state = [&](const StateRows& rows) -> float& {
    return static_cast<float*>(rows.data)[sequence * rows.sequence + head * rows.head + r];
  };
  float dn = call.dn_last.data != nullptr ? at_state(call.dn_last) : 0;
  constexpr int ahead = 16;  // loads that are under way together
  for (int last = chunks - 1; last >= 0; last -= ahead) {
    float sums[ahead], decays[ahead];
#pragma unroll
    for (int x = 0; x < ahead; ++x) {
      const std::int64_t unit = (first + max(last - x, 0)) * call.heads + head;
      sums[x] = has_sums ? call.dn_states[unit * call.dqk + r] : 0;
      decays[x] = call.gbar[unit];
    }
#pragma unroll
    for (int x = 0; x < ahead; ++x) {
      if (last < x) break;
      call.dn_states[((first + last - x) * call.heads + head) * call.dqk + r] = dn;
      dn = decays[x] * dn + sums[x];
    }
  }
  if (call.dn0.data != nullptr) at_state(call.dn0) = dn;
}

}  // namespace

template <class T>
void launch_norm_gradients(const Call<float>& call, cudaStream_t stream) {
  if (call.exact) {
    launch_dots<T>(call, stream);
    launch_chained("norm_sums", norm_sums_kernel<T>, call.numbers * call.heads, threads, 0, stream, call,
                   (call.dqk + Config<T>::width - 1) / Config<T>::width);
  }
  launch_chained("norm_scan", norm_scan_kernel, call.sequences * call.heads, (call.dqk + 31) / 32 * 32, 0, stream, call,
                 call.exact);
}

template void launch_norm_gradients<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_norm_gradients<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
