// Stage `keys` on Hopper: dQ and dK of heads that are too wide for the kernel `gradients`. See docs/hopper.md.
//
// A tile is a chunk of 128 tokens of one head and 128 columns of dqk. V, dH, C and dC stream through a ring in panels
// of 64 columns of dhv, for dP = V dH^T, dK = V dC^T and dQ = dH C^T side by side; Q and K come in for the end of the
// tile, where dP becomes dS. Two consumer warpgroups own 64 keys and 64 queries each, as in `gradients`.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm90/keys/consumer.cuh"
#include "cuda/sm90/keys/producers.cuh"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90 {

namespace keys {

enum class Role : std::uint8_t { producers, consumer_0, consumer_1 };     // of a warpgroup
enum class Producer : std::uint8_t { panels, resident, results, gates };  // of a warp

__global__ void __launch_bounds__(threads, 1)
    keys_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  if (threadIdx.x == 0) Barriers{memory + Plan::barriers}.init();
  __syncthreads();
  switch (static_cast<Role>(threadIdx.x / warpgroup)) {
    case Role::producers: {
      arch::fewer_registers<producer_registers>();
      const bool first_lane = threadIdx.x % 32 == 0;
      switch (static_cast<Producer>(threadIdx.x / 32)) {
        case Producer::panels:
          if (first_lane) load_panels(maps, work, memory);
          break;
        case Producer::resident:
          if (first_lane) load_resident(maps, work, memory);
          break;
        case Producer::results:
          if (first_lane) store_results(maps, work, memory);
          break;
        case Producer::gates: load_gates(work, memory); break;
      }
      break;
    }
    case Role::consumer_0:
      arch::more_registers<consumer_registers>();
      Consumer<0>(work, memory).run();
      break;
    case Role::consumer_1:
      arch::more_registers<consumer_registers>();
      Consumer<1>(work, memory).run();
      break;
  }
#endif
}

}  // namespace keys

namespace {

keys::Maps maps_of(const Call<float>& call) {
  const auto tokens = [&](const Rows& rows, int columns, int box) {
    return token_map(rows, call.batch, call.tokens, call.heads, columns, box);
  };
  const auto states = [&](const void* data) {
    return matrix_map(data, call.numbers * call.heads, call.dqk, call.padded_dhv(), keys::columns);
  };
  return {.q = tokens(call.q, call.dqk, keys::chunk),
          .k = tokens(call.k, call.dqk, keys::chunk),
          .v = tokens(call.v, call.dhv, keys::chunk),
          .dh = tokens(call.dh, call.dhv, keys::chunk),
          .dq = tokens(call.dq, call.dqk, keys::half),
          .dk = tokens(call.dk, call.dqk, keys::half),
          .C = states(call.states),
          .dC = states(call.dstates)};
}

keys::Work work_of(const Call<float>& call) {
  const int parts = (call.dqk + keys::columns - 1) / keys::columns;
  return {.u = call.u,
          .c = call.log_c,
          .inverse = call.inverse,
          .b = call.b,
          .m_start = call.m_start,
          .m_end = call.m_end,
          .row_sums = call.row_sums,
          .column_sums = call.column_sums,
          .outflow = call.outflow,
          .scale = static_cast<float>(call.scale),
          .heads = call.heads,
          .chunks_per_row = call.chunks_per_row,
          .tokens = static_cast<int>(call.tokens),
          .all_tokens = static_cast<int>(call.all_tokens()),
          .parts = parts,
          .dhv_panels = (call.dhv + panel - 1) / panel,
          .part_vector = static_cast<int>(call.all_tokens() * call.heads),
          .by_parts = Divider(static_cast<std::uint32_t>(parts)),
          .by_heads = Divider(static_cast<std::uint32_t>(call.heads)),
          .by_chunks_per_row = Divider(static_cast<std::uint32_t>(call.chunks_per_row)),
          .tiles = static_cast<unsigned>(call.numbers * call.heads * parts)};
}

}  // namespace

void launch_keys(const Call<float>& call, cudaStream_t stream) {
  static_assert(keys::columns == Config<__nv_bfloat16>::width, "row sums come in parts of as many columns");
  const keys::Work work = work_of(call);
  const std::int64_t blocks = std::min<std::int64_t>(work.tiles, multiprocessors());
  launch_blocks("keys", keys::keys_kernel, blocks, keys::threads, keys::shared_bytes, stream, maps_of(call), work);
}

}  // namespace tfla::cuda::sm90
