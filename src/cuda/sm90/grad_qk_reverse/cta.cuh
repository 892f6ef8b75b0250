// grad_qk_reverse: what a CTA works on.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/common/state_item.cuh"
#include "cuda/sm90/grad_qk_reverse/shared.cuh"

namespace tfla::cuda::sm90::grad_qk_reverse {

struct Maps {
  CUtensorMap q, k, v, dh;  // boxes of 128 tokens
  CUtensorMap dq, dk;       // of 64
  CUtensorMap C;            // of 64 rows of a state
};

// What a launch adds to the call.
struct Work {
  Chunks chunks;
  int row_tiles, items;  // items: of segments that have chunks
};
struct PackedWork : Work {
  Units units;
  Divider by_rows, by_heads;
};

// What every thread of a CTA knows.
template <class C>
struct Cta {
  using Item = std::conditional_t<C::packed, PackedItem, DenseItem>;
  using Maps = MapsFor<grad_qk_reverse::Maps, C::packed>;
  using Work = std::conditional_t<C::packed, PackedWork, grad_qk_reverse::Work>;

  const Call<float>& call;
  const Maps& maps;
  const Work& work;
  unsigned memory;

  __device__ __forceinline__ Barriers<C> barriers() const { return {memory}; }

  // The items of this CTA: 64 rows of dC over a segment. The row tiles of a head are neighbours and run at the same
  // time: V, dH, which all of them read, come from L2 for all but one.
  template <class Visit>
  __device__ __forceinline__ void each_item(const Visit& visit) const {
    if constexpr (C::packed) {
      each_unit(call, false, work.units, [&](int unit) {
        const Item it = item(unit);
        if (it.low < it.high) visit(it);
      });
    } else {
#pragma unroll 1
      for (int unit = blockIdx.x; unit < work.items; unit += static_cast<int>(arch::grid_blocks())) visit(item(unit));
    }
  }
  // visit(item, number of a chunk and head) for the chunks of all items, in reverse time.
  template <class Visit>
  __device__ __forceinline__ void each_chunk(const Visit& visit) const {
    each_item([&](const Item& it) {
#pragma unroll 1
      for (int chunk = it.high - 1; chunk >= it.low; --chunk) visit(it, unit_of(it, chunk));
    });
  }
  __device__ __forceinline__ unsigned unit_of(const Item& it, int chunk) const {
    return static_cast<unsigned>((static_cast<int>(it.first_number) + chunk) * call.dims.heads + it.head);
  }

 private:
  __device__ __forceinline__ Item item(unsigned unit) const {
    if constexpr (C::packed) {
      const unsigned by_rows = work.by_rows.quotient(unit), number = work.by_heads.quotient(by_rows);
      return {call, Segment(call, number, chunk_tokens), 0,
              static_cast<int>(unit - by_rows * work.row_tiles) * tile_rows,
              static_cast<int>(by_rows - number * call.dims.heads)};
    } else {
      return {call, unit, work.row_tiles, 1, tile_rows, 0, call.dims.chunks_per_segment};
    }
  }
};

}  // namespace tfla::cuda::sm90::grad_qk_reverse
