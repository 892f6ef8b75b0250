// <C, dC> at the end of every chunk, from the traces that stage `keys` leaves: what launch_gate_gradients reads as
// `through`.
//
// C and dC of a trace are both rounded, and where nothing is forgotten df is made of little else: alone, a trace is not
// good enough. Its neighbours tell the same. With F the trace of a chunk and what flows out of it, and R the sum of
// q.dq - k.dk over a chunk, <C, dC> falls by R from the start of a chunk to its end: F + R (of all chunks up to it) is
// the same number for every chunk of a sequence. Chunks within reach are averaged, each with the decay of the state on
// the way there for its weight: across a gate that closes, nothing is to be learnt.
#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90 {

namespace {

// Farther ones add the errors of more sums than they take away (docs/hopper.md).
constexpr int reach = 2;
constexpr int run = 16;  // chunks of a block, all of one head
constexpr int warps = 8;

struct Ends {
  double end;      // F
  double fall;     // R
  double outflow;  // of the chunk
  float decay;
  int first;  // number of the sequence's first chunk; -1: there is no such chunk
};

// By a warp.
__device__ __forceinline__ Ends read_ends(const Call<float>& call, std::int64_t number, int head, int parts) {
  Ends ends{.end = 0, .fall = 0, .outflow = 0, .decay = 0, .first = -1};
  if (number < 0 || number >= call.numbers || call.chunks[number].length == 0) return ends;
  const Chunk chunk = call.chunks[number];
  const std::int64_t unit = number * call.heads + head;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int part = 0; part < parts; ++part) {
    const std::int64_t at = part * call.heads * call.all_tokens() + call.vector(chunk, head);
    for (int t = lane; t < chunk.length; t += 32) {
      ends.fall += static_cast<double>(call.row_sums[at + t]) - static_cast<double>(call.column_sums[at + t]);
      ends.outflow += static_cast<double>(call.outflow[at + t]);
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    ends.fall += __shfl_xor_sync(0xFFFFFFFFU, ends.fall, offset);
    ends.outflow += __shfl_xor_sync(0xFFFFFFFFU, ends.outflow, offset);
  }
  ends.end = ends.outflow;
  for (int part = 0; part < call.trace_parts; ++part) ends.end += call.traces[unit * call.trace_parts + part];
  ends.decay = call.gbar[unit];
  ends.first = chunk.first;
  return ends;
}

__global__ void __launch_bounds__(warps * 32) passing_kernel(Call<float> call, int parts) {
  __shared__ Ends all[run + 2 * reach];
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.x % call.heads);
  const std::int64_t start = static_cast<std::int64_t>(blockIdx.x / call.heads) * run;
  for (int x = static_cast<int>(threadIdx.x) / 32; x < run + 2 * reach; x += warps) {
    const Ends ends = read_ends(call, start + x - reach, head, parts);
    if (threadIdx.x % 32 == 0) all[x] = ends;
  }
  __syncthreads();
  const int x = static_cast<int>(threadIdx.x) + reach;
  const std::int64_t number = start + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= run || number >= call.numbers) return;
  const Ends& own = all[x];
  if (own.first < 0) return;
  double sum = own.end, weights = 1, fall = 0, weight = 1;
  const auto add = [&](const Ends& other) {
    sum += weight * (other.end + fall);
    weights += weight;
  };
  for (int y = x + 1; y <= x + reach && all[y].first == own.first; ++y) {
    weight *= static_cast<double>(all[y - 1].decay);
    fall += all[y].fall;
    add(all[y]);
  }
  fall = 0;
  weight = 1;
  for (int y = x - 1; y >= x - reach && all[y].first == own.first; --y) {
    weight *= static_cast<double>(all[y + 1].decay);
    fall -= all[y + 1].fall;
    add(all[y]);
  }
  // launch_gate_gradients adds half of the outflow where a chunk follows, else all of it.
  const bool has_next = all[x + 1].first == own.first;
  call.through[number * call.heads + head] = sum / weights - (has_next ? 0.5 : 1.0) * own.outflow;
}

}  // namespace

void launch_passing(const Call<float>& call, cudaStream_t stream) {
  const int parts = (call.dqk + Config<__nv_bfloat16>::width - 1) / Config<__nv_bfloat16>::width;
  const std::int64_t blocks = (call.numbers + run - 1) / run * call.heads;
  launch_chained("passing", passing_kernel, blocks, warps * 32, 0, stream, call, parts);
}

}  // namespace tfla::cuda::sm90
