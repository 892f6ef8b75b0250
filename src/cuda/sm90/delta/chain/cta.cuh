// Kernels along the chain of states: what a CTA works on.
#pragma once

#include "cuda/delta/tokens.cuh"
#include "cuda/sm90/common/lane.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/delta/chain/shared.cuh"

namespace tfla::cuda::sm90::delta_rule {

using T = __nv_bfloat16;
using arch::Major;
using tfla::cuda::delta::Sequence;

struct ChainMaps {
  CUtensorMap q, k, solved;
  CUtensorMap v, h;  // in reverse dH and dV
};

// What a launch adds to the call.
struct ChainWork {
  int column_tiles;
};

// The work of a CTA: some columns of a head of a sequence.
template <class C>
struct ChainItem {
  using Shared = ChainShared<C>;
  const DeltaCall& call;
  const MapsFor<ChainMaps, C::packed>& maps;
  Shared shared;
  std::int64_t sequence_number;
  Sequence sequence;
  int head, column, tiles;

  __device__ __forceinline__ ChainItem(const DeltaCall& c, const MapsFor<ChainMaps, C::packed>& m,
                                       const ChainWork& work, unsigned memory)
      : call(c), maps(m), shared{memory} {
    const unsigned unit = blockIdx.x, by_column = unit / work.column_tiles;
    column = static_cast<int>(unit % work.column_tiles) * C::columns;
    head = static_cast<int>(by_column % call.dims.heads);
    sequence_number = by_column / call.dims.heads;
    sequence = sequence_at(call, sequence_number);
    tiles = static_cast<int>(tiles_of(call, sequence));
  }

  // The tiles in the order of the chain.
  [[nodiscard]] __device__ __forceinline__ int tile_at(int step) const { return C::reverse ? tiles - 1 - step : step; }
  // Coordinates in a token_map.
  [[nodiscard]] __device__ __forceinline__ int map_token(int tile) const {
    return tile * tile_tokens + (C::packed ? static_cast<int>(call.dims.tokens - sequence.length) : 0);
  }
  [[nodiscard]] __device__ __forceinline__ int map_batch() const {
    return C::packed ? static_cast<int>(sequence.token + sequence.length) : sequence.batch;
  }
  // Tokens of a tile, and the row of its first one in scratch [B,T,H].
  [[nodiscard]] __device__ __forceinline__ int count(int tile) const {
    const std::int64_t left = sequence.length - static_cast<std::int64_t>(tile) * tile_tokens;
    return static_cast<int>(left < tile_tokens ? left : tile_tokens);
  }
  [[nodiscard]] __device__ __forceinline__ std::int64_t row(int tile) const {
    const std::int64_t token = sequence.token + static_cast<std::int64_t>(tile) * tile_tokens;
    return (sequence.batch * call.dims.tokens + token) * call.dims.heads + head;
  }
  // The state of a tile in scratch [tiles,H,dqk,dhv].
  [[nodiscard]] __device__ __forceinline__ std::int64_t state(int tile) const {
    return ((sequence.first_tile + tile) * call.dims.heads + head) * call.dims.dqk * call.dims.dhv;
  }
};

}  // namespace tfla::cuda::sm90::delta_rule
