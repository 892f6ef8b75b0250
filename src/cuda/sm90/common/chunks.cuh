// Chunks of 128 tokens of one head, as the kernels of gradients take them, and their gate vectors in shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/cluster.cuh"
#include "cuda/arch/copy.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/common/device.cuh"
#include "cuda/sm90/common/divider.h"
#include "cuda/sm90/common/scale16.cuh"
#include "cuda/sm90/common/tensor_map.h"

namespace tfla::cuda::sm90::scores {

inline constexpr int chunk = chunk_tokens;
inline constexpr int half = token_block;          // keys, and queries, of a consumer
inline constexpr unsigned row_bytes = 2 * panel;  // of a panel in shared memory
inline constexpr unsigned slot_bytes = chunk * row_bytes;
inline constexpr unsigned half_bytes = half * row_bytes;
inline constexpr int last_tile = 256;  // added to the tokens of a block's last tile: what consumers know of the grid
inline constexpr int warpgroup = warpgroup_threads;

// What is common to all chunks of a call.
struct Chunks {
  const float2* u;
  const float2* c;
  const float* inverse;
  const double* b_last;
  const double* m_start;
  const double* m_end;
  float scale;  // above zero: its logarithm is taken
  int heads, chunks_per_row, tokens, all_tokens;
  Divider by_heads, by_chunks_per_row;
  const Chunk* table;                 // of packed sequences
  const float* state_inverse_scales;  // of float16: see Call
  const float* dstate_inverse_scales;
  const float* deta;  // null: zero

  explicit Chunks(const Call<float>& call)
      : u(call.gates.u),
        c(call.gates.log_c),
        inverse(call.gates.inverse),
        b_last(call.gates.b_last),
        m_start(call.gates.m_start),
        m_end(call.gates.m_end),
        scale(static_cast<float>(call.rules.scale)),
        heads(call.dims.heads),
        chunks_per_row(call.dims.chunks_per_row),
        tokens(static_cast<int>(call.dims.tokens)),
        all_tokens(static_cast<int>(call.dims.all_tokens())),
        by_heads(static_cast<std::uint32_t>(call.dims.heads)),
        by_chunks_per_row(static_cast<std::uint32_t>(std::max(call.dims.chunks_per_row, 1))),
        table(call.packing.chunks),
        state_inverse_scales(call.stored.inverse_scale_C),
        dstate_inverse_scales(call.stored.inverse_scale_dC),
        deta(call.rules.exact ? call.gates.deta : nullptr) {}
};

// A chunk of a head. Heads of a chunk are neighbours: they lie side by side in memory.
template <bool Packed>
struct Tile {
  int head;
  int state;  // number of the (chunk, head)
  int batch;
  int token;   // first one, in its row of the batch; of packed sequences both are as a token_map has them
  int length;  // tokens; those beyond are zero in every operand, and not stored
  int at;      // where vectors begin

  __device__ __forceinline__ Tile(const Chunks& chunks, unsigned index) : state(static_cast<int>(index)) {
    const auto number = static_cast<int>(chunks.by_heads.quotient(index));
    head = state - number * chunks.heads;
    if constexpr (Packed) {  // to the map a chunk is a sequence of its own, and ends as one
      const auto start = static_cast<int>(chunks.table[number].packed);
      length = chunks.table[number].length;
      batch = start + length;
      token = chunks.tokens - length;
      at = head * chunks.all_tokens + start;
      return;
    }
    batch = static_cast<int>(chunks.by_chunks_per_row.quotient(number));
    token = (number - batch * chunks.chunks_per_row) * chunk;
    length = min(chunk, chunks.tokens - token);
    at = head * chunks.all_tokens + batch * chunks.tokens + token;
  }
};

// Tiles that are a whole chunk and head.
struct Wholes {
  unsigned tiles;

  __device__ __forceinline__ unsigned chunk_of(unsigned tile) const { return tile; }
};

// Tiles that are parts of a chunk and head. Those of a chunk are neighbours and run at a time: what they have in common
// comes from L2 for all but one of them.
struct Parts {
  unsigned tiles;
  unsigned count;  // of a chunk and head
  Divider by_count, by_blocks;

  Parts(const Call<float>& call, int parts, std::int64_t blocks)
      : tiles(static_cast<unsigned>(call.dims.chunk_count * call.dims.heads * parts)),
        count(static_cast<unsigned>(parts)),
        by_count(static_cast<std::uint32_t>(parts)),
        by_blocks(static_cast<std::uint32_t>(blocks)) {}

  __device__ __forceinline__ unsigned chunk_of(unsigned tile) const { return by_count.quotient(tile); }
  // Parts in turn: the last one may be narrower, and a block with nothing but those would run ahead of its neighbours,
  // who have the other parts of its chunks.
  __device__ __forceinline__ unsigned part_of(unsigned tile) const {
    const unsigned first = chunk_of(tile) * count;
    const unsigned part = tile + by_blocks.quotient(first);
    return part - by_count.quotient(part) * count;
  }
};

// The tiles of this block: every gridDim.x-th one, without those of numbers that no chunk of packed sequences has.
// There may be none.
template <bool Packed, class Tiles>
__device__ __forceinline__ unsigned next_tile(const Chunks& chunks, const Tiles& tiles, unsigned index) {
  if constexpr (Packed) {
    while (index < tiles.tiles && chunks.table[chunks.by_heads.quotient(tiles.chunk_of(index))].length == 0)
      index += arch::grid_blocks();
  }
  return index;
}
template <bool Packed, class Tiles>
__device__ __forceinline__ unsigned first_tile(const Chunks& chunks, const Tiles& tiles) {
  return next_tile<Packed>(chunks, tiles, blockIdx.x);
}
template <bool Packed, class Tiles>
__device__ __forceinline__ unsigned tile_after(const Chunks& chunks, const Tiles& tiles, unsigned index) {
  return next_tile<Packed>(chunks, tiles, index + (Packed ? arch::grid_blocks() : gridDim.x));
}

// How a kernel over tiles begins: its warpgroups are producers and two consumers. False where a block has no tiles.
enum class Role : std::uint8_t { producers, consumer_0, consumer_1 };
template <bool Packed, class Tiles, class InitBarriers>
__device__ __forceinline__ bool begin(const Chunks& chunks, const Tiles& tiles, const InitBarriers& init_barriers) {
  if (threadIdx.x == 0) init_barriers();
  __syncthreads();
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  return !Packed || first_tile<Packed>(chunks, tiles) < tiles.tiles;
}
__device__ __forceinline__ Role role() { return static_cast<Role>(threadIdx.x / warpgroup); }

// Where the vectors of a tile lie in shared memory, from `start` on. More: with what traces and gradients of n take.
template <unsigned Start, bool More = false>
struct GatePlan {
  static constexpr unsigned u = Start;               // float2 [chunk], with log2(scale / den) in it
  static constexpr unsigned c = u + chunk * 8;       // float2 [chunk]
  static constexpr unsigned inflow = c + chunk * 8;  // float2: qbar = exp_sum(u, inflow)
  static constexpr unsigned outflow = inflow + 8;    // float2: abar = exp_sum(c, outflow)
  // int2: where vectors begin, of packed sequences those of the tile's part; tokens (+ last_tile)
  static constexpr unsigned vectors = outflow + 8;
  static constexpr bool more = More;
  static constexpr unsigned etas = vectors + 8;        // float [chunk]: den deta, as dP would have it
  static constexpr unsigned index = etas + chunk * 4;  // int2: of the tile; <n, dn>, a float
  static constexpr unsigned end = More ? index + 8 : etas;
};

// One warp: the vectors of a block's tiles. u, which takes arithmetic, waits in registers for the room of the tile
// before. All lanes arrive at `full`. Consumers of packed sequences know of tiles what they are told here;
// part_vectors(tile): where the vectors of its part begin, among those of all parts. Lowers: states of float16 are in
// one tile each, whose lifts qbar and abar take back. Norms: with deta, and norm(tile), which is <n, dn>.
template <class Plan, bool Packed, bool Lowers, bool Norms, class Tiles, class PartVectors, class Norm>
__device__ __forceinline__ void load_gates(const Chunks& chunks, const Tiles& tiles, unsigned memory, unsigned full,
                                           unsigned empty, const PartVectors& part_vectors, const Norm& norm) {
  const int lane = threadIdx.x % 32;
  unsigned parity = 1, next = 0;
#pragma unroll 1
  for (unsigned index = first_tile<Packed>(chunks, tiles); index < tiles.tiles;
       index = Packed ? next : index + gridDim.x, parity ^= 1) {
    if (Packed) next = tile_after<Packed>(chunks, tiles, index);
    const Tile<Packed> tile(chunks, tiles.chunk_of(index));
    float2 u[chunk / 32];
    float etas[chunk / 32];
#pragma unroll
    for (int x = 0; x < chunk / 32; ++x) {
      const int t = lane + 32 * x;
      const bool valid = t < tile.length;
      if constexpr (Norms) {
        etas[x] = 0;
        if (valid && chunks.deta != nullptr) etas[x] = chunks.deta[tile.at + t] / chunks.inverse[tile.at + t];
      }
      u[x] = valid ? chunks.u[tile.at + t] : float2{};
      u[x].y += __log2f(chunks.scale * (valid ? chunks.inverse[tile.at + t] : 0));  // D is zero beyond the tokens
      arch::pin(u[x]);
    }
    float product = 0;
    if constexpr (Norms) product = norm(index);
    arch::wait(empty, parity);
#pragma unroll
    for (int x = 0; x < chunk / 32; ++x) {
      arch::write_float2(memory + Plan::u + 8 * (lane + 32 * x), u[x]);
      if constexpr (Norms) arch::write_float(memory + Plan::etas + 4 * (lane + 32 * x), etas[x]);
    }
#pragma unroll 1
    for (int t = lane; t < chunk; t += 32)
      arch::copy_small<8>(memory + Plan::c + 8 * t, chunks.c + tile.at + min(t, tile.length - 1), t < tile.length);
    if (lane == 0) {
      float2 inflow, outflow;
      as_exponent(chunks.m_start[tile.state], inflow);
      if constexpr (Lowers) inflow.y += static_cast<float>(exponent_of(chunks.state_inverse_scales[tile.state]));
      arch::write_float2(memory + Plan::inflow, inflow);
      as_exponent(chunks.b_last[tile.state] - chunks.m_end[tile.state], outflow);
      if constexpr (Lowers) outflow.y += static_cast<float>(exponent_of(chunks.dstate_inverse_scales[tile.state]));
      arch::write_float2(memory + Plan::outflow, outflow);
      int vectors = tile.at;
      if (Packed || Norms) vectors += part_vectors(index);
      if constexpr (Plan::more)
        arch::write_int2(memory + Plan::index, {static_cast<int>(index), __float_as_int(product)});
      arch::write_int2(memory + Plan::vectors,
                       {vectors, tile.length + ((Packed ? next : index + gridDim.x) < tiles.tiles ? 0 : last_tile)});
    }
    arch::commit_copies();
    arch::wait_copies<0>();
    arch::arrive(full);
  }
}
template <class Plan, bool Packed, bool Lowers = false, class Tiles, class PartVectors>
__device__ __forceinline__ void load_gates(const Chunks& chunks, const Tiles& tiles, unsigned memory, unsigned full,
                                           unsigned empty, const PartVectors& part_vectors) {
  load_gates<Plan, Packed, Lowers, false>(chunks, tiles, memory, full, empty, part_vectors, [](unsigned) { return 0; });
}

}  // namespace tfla::cuda::sm90::scores
