// Tiles of work of the kernels of gradients: a chunk of 128 tokens of one head, or some of its columns. A kernel has as
// many CTAs as the GPU runs at a time, and each takes every gridDim.x-th tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/divider.h"
#include "cuda/sm90/common/limits.h"
#include "cuda/sm90/common/scale16.cuh"
#include "cuda/sm90/entry.h"

namespace tfla::cuda::sm90::grad {

// What the configurations of these kernels have in common.
template <class Type, bool Packed>
struct ConfigBase {
  using T = Type;  // of q, k, v
  static constexpr bool packed = Packed;
  static constexpr bool scaled = needs_scale16<T>;
  static constexpr bool norm = false;                   // with gradients of n
  static constexpr bool state_scales_in_gates = false;  // float16: qbar and abar undo the scales of C and dC

  // Warpgroup 0 loads and stores; the math warpgroups 1 and 2 own the two token blocks of a chunk.
  static constexpr int threads = 3 * warpgroup_threads, math_warps = 2 * warpgroup_warps;
};

// What all chunks of a call have in common.
struct Chunks {
  const float2* u;
  const float2* c;
  const float* inverse;
  const double* b_last;
  const double* m_start;
  const double* m_end;
  float scale;  // above zero: its logarithm is taken
  int heads, chunks_per_row, tokens, all_tokens;
  Divider by_heads, by_chunks_per_row, by_group;
  const Chunk* table;            // of packed sequences
  const float* inverse_scale_C;  // float16: see StoredStates
  const float* inverse_scale_dC;
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
        by_group(static_cast<std::uint32_t>(call.dims.group)),
        table(call.packing.chunks),
        inverse_scale_C(call.stored.inverse_scale_C),
        inverse_scale_dC(call.stored.inverse_scale_dC),
        deta(call.rules.exact ? call.gates.deta : nullptr) {}
};

// A chunk of a head. The heads of a chunk have neighbouring numbers: they lie side by side in memory.
template <bool Packed>
struct Tile {
  int head;
  int state;  // number of the (chunk, head)
  int batch;
  int token;   // first one, in its row of the batch; for packed sequences batch and token are coordinates of token_map
  int length;  // tokens; those beyond read as zero and are not stored
  int at;      // where the tile's vectors begin

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
    token = (number - batch * chunks.chunks_per_row) * chunk_tokens;
    length = min(chunk_tokens, chunks.tokens - token);
    at = head * chunks.all_tokens + batch * chunks.tokens + token;
  }
  // The head of q and k that this one reads.
  [[nodiscard]] __device__ __forceinline__ int qk_head(const Chunks& chunks) const {
    return static_cast<int>(chunks.by_group.quotient(static_cast<unsigned>(head)));
  }
};

// Every tile is a whole chunk of a head.
struct WholeTiles {
  unsigned tiles;

  explicit WholeTiles(const Call<float>& call)
      : tiles(static_cast<unsigned>(call.dims.chunk_count * call.dims.heads)) {}

  __device__ __forceinline__ unsigned chunk_of(unsigned tile) const { return tile; }
};

// Every tile is some of the columns of a chunk of a head. The tiles of a chunk are neighbours and run at the same time:
// what all of them read comes from L2 for all but one.
struct ColumnTiles {
  unsigned tiles;
  unsigned per_chunk;  // and head
  Divider by_per_chunk, by_ctas;

  ColumnTiles(const Call<float>& call, int tiles_per_chunk, std::int64_t ctas)
      : tiles(static_cast<unsigned>(call.dims.chunk_count * call.dims.heads * tiles_per_chunk)),
        per_chunk(static_cast<unsigned>(tiles_per_chunk)),
        by_per_chunk(static_cast<std::uint32_t>(tiles_per_chunk)),
        by_ctas(static_cast<std::uint32_t>(ctas)) {}

  __device__ __forceinline__ unsigned chunk_of(unsigned tile) const { return by_per_chunk.quotient(tile); }
  // Which tile of its chunk this is. A CTA takes first, second, ... tiles in turn: the last one may have fewer columns,
  // and a CTA that had only those would run ahead of the CTAs that have the other tiles of its chunks.
  __device__ __forceinline__ unsigned column_tile_of(unsigned tile) const {
    const unsigned first = chunk_of(tile) * per_chunk;
    const unsigned number = tile + by_ctas.quotient(first);
    return number - by_per_chunk.quotient(number) * per_chunk;
  }
};

// The CTAs of a grid that works through so many tiles. resident: CTAs of a multiprocessor.
inline std::int64_t ctas_for(std::int64_t tiles, int resident = 1) {
  return std::min<std::int64_t>(tiles, static_cast<std::int64_t>(resident) * multiprocessors());
}

// The tiles of this CTA. Numbers that no chunk of packed sequences has are left out; a CTA may have no tile at all.
template <bool Packed, class Work>
__device__ __forceinline__ unsigned next_tile(const Work& work, unsigned index) {
  if constexpr (Packed) {
    const Chunks& chunks = work.chunks;
    while (index < work.tiles.tiles && chunks.table[chunks.by_heads.quotient(work.tiles.chunk_of(index))].length == 0)
      index += arch::grid_blocks();
  }
  return index;
}
template <bool Packed, class Work>
__device__ __forceinline__ unsigned first_tile(const Work& work) {
  return next_tile<Packed>(work, blockIdx.x);
}
template <bool Packed, class Work>
__device__ __forceinline__ unsigned tile_after(const Work& work, unsigned index) {
  return next_tile<Packed>(work, index + (Packed ? arch::grid_blocks() : gridDim.x));
}
template <bool Packed, class Work>
__device__ __forceinline__ bool has_tiles(const Work& work) {
  return !Packed || first_tile<Packed>(work) < work.tiles.tiles;
}
// visit(number) for each of them. parity: flipped from one to the next.
template <bool Packed, class Work, class Visit>
__device__ __forceinline__ void each_tile(const Work& work, unsigned& parity, const Visit& visit) {
  for (unsigned index = first_tile<Packed>(work); index < work.tiles.tiles;
       index = tile_after<Packed>(work, index), parity ^= 1)
    visit(index);
}
template <bool Packed, class Work, class Visit>
__device__ __forceinline__ void each_tile(const Work& work, const Visit& visit) {
  unsigned parity = 0;
  each_tile<Packed>(work, parity, visit);
}

}  // namespace tfla::cuda::sm90::grad
