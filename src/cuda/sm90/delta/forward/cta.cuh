// forward_on_chip: what a CTA works on.
#pragma once

#include "cuda/delta/tokens.cuh"
#include "cuda/sm90/common/lane.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/delta/forward/shared.cuh"

namespace tfla::cuda::sm90::delta_rule {

using T = __nv_bfloat16;
using arch::Major;
using tfla::cuda::delta::Sequence;

struct ForwardMaps {
  CUtensorMap q, k, v, h, solved;
};

// What a launch adds to the call.
struct ForwardWork {
  int column_tiles;
};

// The work of a CTA: some columns of a head of a sequence.
template <class C>
struct ForwardItem {
  using Shared = ForwardShared<C>;
  const DeltaCall& call;
  const MapsFor<ForwardMaps, C::packed>& maps;
  Shared shared;
  std::int64_t sequence_number;
  Sequence sequence;
  int head, column, tiles;

  __device__ __forceinline__ ForwardItem(const DeltaCall& c, const MapsFor<ForwardMaps, C::packed>& m,
                                         const ForwardWork& work, unsigned memory)
      : call(c), maps(m), shared{memory} {
    const unsigned unit = blockIdx.x, by_column = unit / work.column_tiles;
    column = static_cast<int>(unit % work.column_tiles) * C::columns;
    head = static_cast<int>(by_column % call.dims.heads);
    sequence_number = by_column / call.dims.heads;
    sequence = sequence_at(call, sequence_number);
    tiles = static_cast<int>(tiles_of(call, sequence));
  }

  // Coordinates in a token_map.
  [[nodiscard]] __device__ __forceinline__ int map_token(int tile) const {
    return tile * tile_tokens + (C::packed ? static_cast<int>(call.dims.tokens - sequence.length) : 0);
  }
  [[nodiscard]] __device__ __forceinline__ int map_batch() const {
    return C::packed ? static_cast<int>(sequence.token + sequence.length) : sequence.batch;
  }
};

}  // namespace tfla::cuda::sm90::delta_rule
