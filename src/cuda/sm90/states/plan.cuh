// Stage `states` and its reverse-time twin on Hopper: what their roles share.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/segment.cuh"
#include "cuda/sm90/state_tile.cuh"
#include "cuda/sm90/tensor_map.h"

namespace tfla::cuda::sm90::states {

// The states themselves; the totals of segments, from which they start; the same to the digits that H shows.
enum class Pass { proper, totals, rough_totals };

constexpr int warpgroups = 2;
constexpr int threads = (1 + warpgroups) * warpgroup_threads;

// Shared memory, in bytes from a 1,024-byte boundary.
template <Time Direction, int M, int N>
struct Space {
  static constexpr bool reverse = Direction == Time::reverse;
  static constexpr int slots = reverse ? 2 : 3;
  static constexpr int x_bytes = M * panel_bytes;
  static constexpr int y_bytes = N / 64 * panel_bytes;  // of one warpgroup
  static constexpr int slot_bytes = x_bytes + warpgroups * y_bytes;
  static constexpr int half_bytes = M * N / 64 * panel_bytes;  // of a rounded state, the half of one warpgroup
  static constexpr int buffers = reverse ? 2 : 1;
  static constexpr int gate_floats = 2 * block_tokens + 4;  // two weights per token, the decay

  static constexpr int buffer = slots * slot_bytes;
  static constexpr int gates = buffer + buffers * warpgroups * half_bytes;
  static constexpr int barriers = gates + slots * gate_floats * 4;
  static constexpr int full = barriers, empty = full + 8 * slots;
  static constexpr int staged = empty + 8 * slots, drained = staged + 8, loaded = drained + 8;
  static constexpr int bytes = loaded + 8 * buffers + 1024;
};

// The blocks of 64 tokens of one segment, in the order of time, and the tile of the state.
struct Item : Segment {
  int column, row, head;
  int number;       // of the sequence's first chunk
  int last_blocks;  // blocks of the segment's last chunk

  __device__ Item(const Call<float>& call, const Segment& segment, int at_column, int at_row, int of_head)
      : Segment(segment), column(at_column), row(at_row), head(of_head), number(first_number(call, call.L)) {
    const int last_length =
        high == chunks ? static_cast<int>(length - static_cast<std::int64_t>(chunks - 1) * call.L) : call.L;
    last_blocks = (last_length + block_tokens - 1) / block_tokens;
  }
};

// Walks the blocks of an item.
template <Time Direction>
struct BlockWalk {
  const Item& item;
  int per_chunk;
  int chunk, block;  // chunk of the sequence, block of the chunk

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
  CUtensorMap x, y, nothing, stored, c;  // stored: where states go; c: the C of chunk starts, in reverse time
};

struct Shape {
  int row_tiles, column_tiles;
  Units units;
  Divider by_rows, by_columns, by_heads, by_sequences;
};

// What every thread of a block knows.
template <Time Direction, Pass Which, int M, int N>
struct Block {
  using Space = states::Space<Direction, M, N>;
  using Tile = StateTile<M, N, Which == Pass::rough_totals ? Terms::one : Terms::two>;
  static constexpr bool reverse = Direction == Time::reverse;
  static constexpr bool proper = Which == Pass::proper;
  static constexpr int row_step = 64 * M, column_step = warpgroups * N;

  const Call<float>& call;
  const Maps& maps;
  const Shape& shape;
  unsigned space;

  // Totals of the segment that ends the sequence are of no use: those that others follow are taken, in reverse time
  // those that come after others.
  __device__ Item item(int unit) const {
    const auto by_columns = static_cast<int>(shape.by_columns.quotient(unit));
    const auto by_rows = static_cast<int>(shape.by_rows.quotient(by_columns));
    const auto number = static_cast<int>(shape.by_heads.quotient(by_rows));
    return {call, Segment(call, shape.by_sequences, number, call.L, !proper && reverse ? 1 : 0),
            (unit - by_columns * shape.column_tiles) * column_step, (by_columns - by_rows * shape.row_tiles) * row_step,
            by_rows - number * call.heads};
  }
  __device__ bool skips(const Item& it) const {
    if (proper) return !it.has_work();
    return it.low >= it.high || (reverse ? it.index == 0 : it.high == it.chunks);
  }
  __device__ int blocks_per_chunk() const { return (call.L + block_tokens - 1) / block_tokens; }
  __device__ unsigned full(int slot) const { return space + Space::full + 8 * slot; }
  __device__ unsigned empty(int slot) const { return space + Space::empty + 8 * slot; }
  __device__ unsigned gates(int slot) const { return space + Space::gates + slot * Space::gate_floats * 4; }
  __device__ unsigned half(int buffer, int warpgroup) const {
    return space + Space::buffer + (buffer * warpgroups + warpgroup) * Space::half_bytes;
  }

  template <class Work>
  __device__ void each_item(const Work& work) const {
    each_unit(call, !proper, shape.units, [&](int unit) {
      const Item it = item(unit);
      if (!skips(it)) work(it);
    });
  }
};

}  // namespace tfla::cuda::sm90::states
