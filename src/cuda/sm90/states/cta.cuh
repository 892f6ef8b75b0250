// States on Hopper: what a CTA works on.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/common/state_item.cuh"
#include "cuda/sm90/states/shared.cuh"

namespace tfla::cuda::sm90::states {

// Walks the token blocks of an item in the order of time.
template <Time Direction, class Item>
struct BlockWalk {
  const Item& item;
  int per_chunk;
  int chunk, block;  // chunk of the sequence, token block of the chunk

  __device__ __forceinline__ BlockWalk(const Item& it, int blocks_per_chunk) : item(it), per_chunk(blocks_per_chunk) {
    chunk = Direction == Time::forward ? it.low : it.high - 1;
    block = Direction == Time::forward ? 0 : blocks_of(chunk) - 1;
  }
  __device__ __forceinline__ int blocks_of(int c) const { return c == item.high - 1 ? item.last_blocks : per_chunk; }
  __device__ __forceinline__ bool more() const {
    return Direction == Time::forward ? chunk < item.high : chunk >= item.low;
  }
  __device__ __forceinline__ bool enters_chunk() const {
    return block == (Direction == Time::forward ? 0 : blocks_of(chunk) - 1);
  }
  __device__ __forceinline__ void next() {
    if (Direction == Time::forward) {
      if (++block == blocks_of(chunk)) {
        block = 0;
        ++chunk;
      }
    } else if (--block < 0) {
      --chunk;
      block = per_chunk - 1;
    }
  }
};

struct Maps {
  CUtensorMap x, y;    // keys and values; in reverse time queries and dH
  CUtensorMap stored;  // where states go
  CUtensorMap c;       // in reverse time: the C of chunk starts
};

// What a launch adds to the call.
struct Work {
  int row_tiles, column_tiles, items;
};
struct PackedWork : Work {
  Units units;
  Divider by_rows, by_columns, by_heads;
};

// What every thread of a CTA knows.
template <class C>
struct Cta {
  using Item = std::conditional_t<C::packed, PackedItem, DenseItem>;
  using Maps = MapsFor<states::Maps, C::packed>;
  using Work = std::conditional_t<C::packed, PackedWork, states::Work>;
  using Walk = BlockWalk<C::direction, Item>;
  using Slots = Ring<Shared<C>::slots>;

  const Call<float>& call;
  const Maps& maps;
  const Work& work;
  Shared<C> shared;

  template <class Visit>
  __device__ void each_item(const Visit& visit) const {
    const auto take = [&](int unit) {
      const Item it = item(unit);
      if (!skips(it)) visit(it);
    };
    if constexpr (C::packed) {
      each_unit(call, !C::makes_states, work.units, take);
    } else {
      for (int unit = blockIdx.x; unit < work.items; unit += gridDim.x) take(unit);
    }
  }

  __device__ Item item(unsigned unit) const {
    if constexpr (C::packed) {
      const unsigned by_columns = work.by_columns.quotient(unit), by_rows = work.by_rows.quotient(by_columns);
      const unsigned number = work.by_heads.quotient(by_rows);
      return {call, Segment(call, number, call.dims.L, !C::makes_states && C::reverse ? 1 : 0),
              static_cast<int>(unit - by_columns * work.column_tiles) * C::columns,
              static_cast<int>(by_columns - by_rows * work.row_tiles) * C::rows,
              static_cast<int>(by_rows - number * call.dims.heads)};
    } else {
      return {call,
              unit,
              work.row_tiles,
              work.column_tiles,
              C::rows,
              C::columns,
              C::makes_states ? call.dims.chunks_per_segment : call.dims.chunks_per_piece};
    }
  }
  // Nothing starts from the total of the segment that ends the sequence. For packed sequences the list has the segments
  // that others follow; in reverse time their followers are taken.
  __device__ bool skips(const Item& it) const {
    if constexpr (C::packed) {
      if (C::makes_states) return !it.has_work();
      return it.low >= it.high || (C::reverse ? it.segment == 0 : it.high == it.chunks);
    } else {
      const int last = (it.chunks - 1) / call.dims.chunks_per_segment * call.dims.chunks_per_segment;
      return it.empty() || (!C::makes_states && (C::reverse ? it.segment < call.dims.pieces : it.low >= last));
    }
  }
  // Whether the tokens of a chunk are added. The state after the last chunk is made only for a caller who asks for the
  // state at the end of the sequence.
  __device__ __forceinline__ bool adds(const Item& it, int chunk) const {
    if (!C::makes_states || (C::reverse ? chunk > it.low : chunk + 1 < it.high)) return true;
    if (C::reverse ? it.low > 0 : it.high < it.chunks) return false;
    return (C::reverse ? call.carried.dC0 : call.carried.C_last).data != nullptr ||
           (C::reverse ? call.carried.dn0 : call.carried.n_last).data != nullptr;
  }
  // The tile of an item among those of a state.
  __device__ int tile_of(const Item& it) const { return it.row / C::rows * work.column_tiles + it.column / C::columns; }
  __device__ int blocks_per_chunk() const { return (call.dims.L + token_block - 1) / token_block; }
};

}  // namespace tfla::cuda::sm90::states
