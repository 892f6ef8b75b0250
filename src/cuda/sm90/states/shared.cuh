// Stage `states` and its reverse-time twin on Hopper: what their roles share.
#pragma once

#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/common/segment.cuh"
#include "cuda/sm90/common/state_tile.cuh"
#include "cuda/sm90/common/tensor_map.h"

namespace tfla::cuda::sm90::states {

// The states themselves; the totals of segments, from which they start; the same to the digits that H shows.
enum class Pass { proper, totals, rough_totals };

// Who does what: 64 M rows by Columns of a state, dealt out to warpgroups by columns, and one warpgroup that moves
// data.
template <int M, int Columns>
struct Roles {
  static constexpr int warpgroups = Columns > 64 ? 2 : 1;
  static constexpr int N = Columns / warpgroups;  // columns of one of them
  static constexpr int threads = (1 + warpgroups) * warpgroup_threads;
};

// Shared memory, in bytes from a 1,024-byte boundary.
template <Time Direction, int M, int Columns>
struct Space : Roles<M, Columns> {
  using Roles<M, Columns>::N, Roles<M, Columns>::warpgroups;
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
  // One for each buffer: a warp may be done with the next chunk while another is not with this one.
  static constexpr int staged = empty + 8 * slots, drained = staged + 8 * buffers, loaded = drained + 8;
  static constexpr int largest = (loaded + 8 * buffers + 15) / 16 * 16;  // float16: the largest numbers of warps
  static constexpr int bytes = largest + 2 * 4 * 4 * warpgroups + 1024;
  static_assert(bytes <= cta_shared_bytes, "what a CTA may have");
};

// Blocks of a multiprocessor, and registers of a thread. Those of narrow heads mostly wait: there are as many as do not
// spill and shared memory has room for.
template <Time Direction, int M, int Columns>
struct Residents {
  static constexpr int blocks = M > 1 || Columns > 64 ? 1 : Direction == Time::reverse ? 4 : 2;
  static constexpr int threads = Roles<M, Columns>::threads;
  static constexpr int own_bytes = 1024;  // of shared memory, which each takes besides
  static_assert(blocks * (Space<Direction, M, Columns>::bytes + own_bytes) <= 233472, "what a multiprocessor has");
  static constexpr int movers = 40;
  static constexpr int state = blocks == 1 ? 232 : 65536 / (blocks * warpgroup_threads) - movers;
};

// The blocks of 64 tokens of one segment, or piece of one, in the order of time, and the tile of the state.
struct DenseItem {
  int column, row, segment, head;       // segment: or piece
  std::int64_t sequence, first_number;  // number of the sequence's first chunk
  int chunks, low, high;                // of the sequence, of the segment
  int last_blocks;                      // blocks of the segment's last chunk

  template <class Real>
  __device__ DenseItem(const Call<Real>& call, unsigned unit, int row_tiles, int column_tiles, int row_step,
                       int column_step, int segment_chunks) {
    column = static_cast<int>(unit % column_tiles) * column_step;
    unit /= column_tiles;
    row = static_cast<int>(unit % row_tiles) * row_step;
    unit /= row_tiles;
    head = static_cast<int>(unit % call.dims.heads);
    unit /= call.dims.heads;
    sequence = unit % call.dims.sequences;
    segment = static_cast<int>(unit / call.dims.sequences);
    chunks = call.dims.chunks_per_row;
    first_number = sequence * chunks;
    low = min(segment * segment_chunks, chunks);
    high = min(low + segment_chunks, chunks);
    const int last_length =
        high == chunks ? static_cast<int>(call.dims.tokens - static_cast<std::int64_t>(chunks - 1) * call.dims.L)
                       : call.dims.L;
    last_blocks = (last_length + block_tokens - 1) / block_tokens;
  }
  __device__ bool empty() const { return low >= high; }
  // As Segment has them.
  __device__ int map_token(const Call<float>& /*call*/) const { return 0; }
  __device__ int map_batch(const Call<float>& /*call*/) const { return static_cast<int>(sequence); }
  __device__ std::int64_t tokens(const Call<float>& call) const { return call.dims.tokens; }
  __device__ std::int64_t first_token(const Call<float>& call) const { return sequence * call.dims.tokens; }
};

// The same of packed sequences, whose segments have no pieces.
struct PackedItem : Segment {
  int column, row, head;
  int first_number;  // as above
  int last_blocks;

  __device__ PackedItem(const Call<float>& call, const Segment& segment, int at_column, int at_row, int of_head)
      : Segment(segment), column(at_column), row(at_row), head(of_head), first_number(first_chunk_number(call.dims.L)) {
    const int last_length = high == chunks ? length - (chunks - 1) * call.dims.L : call.dims.L;
    last_blocks = (last_length + block_tokens - 1) / block_tokens;
  }
  __device__ int first_token(const Call<float>& /*call*/) const { return start; }
};

// Walks the blocks of an item.
template <Time Direction, class Item>
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
  CUtensorMap x, y, stored, c;  // stored: where states go; c: the C of chunk starts, in reverse time
};

struct PackedMaps : Maps {
  CUtensorMap nothing;
};

struct Shape {
  int row_tiles, column_tiles, items;
};
struct PackedShape : Shape {
  Units units;
  Divider by_rows, by_columns, by_heads;
};

// What every thread of a block knows.
template <class T, Time Direction, Pass Which, int M, int Columns, bool Packed>
struct Block {
  using Item = std::conditional_t<Packed, PackedItem, DenseItem>;
  using Maps = std::conditional_t<Packed, PackedMaps, states::Maps>;
  using Shape = std::conditional_t<Packed, PackedShape, states::Shape>;
  using Space = states::Space<Direction, M, Columns>;
  static constexpr int warpgroups = Space::warpgroups, N = Space::N;
  static constexpr bool lifted = has_lifts<T>;
  static constexpr bool reverse = Direction == Time::reverse;
  static constexpr bool proper = Which == Pass::proper;
  static constexpr bool pairs = !lifted && (!proper || M == 1);
  static constexpr auto terms = lifted || Which == Pass::rough_totals ? Terms::one : Terms::two;
  using Tile = std::conditional_t<pairs, StateTile<T, M, N, terms, 1, 2, true>, StateTile<T, M, N, terms>>;
  static constexpr int row_step = 64 * M, column_step = Columns;

  const Call<float>& call;
  const Maps& maps;
  const Shape& shape;
  unsigned space;

  __device__ Item item(unsigned unit) const {
    if constexpr (Packed) {
      const unsigned by_columns = shape.by_columns.quotient(unit), by_rows = shape.by_rows.quotient(by_columns);
      const unsigned number = shape.by_heads.quotient(by_rows);
      return {call, Segment(call, number, call.dims.L, !proper && reverse ? 1 : 0),
              static_cast<int>(unit - by_columns * shape.column_tiles) * column_step,
              static_cast<int>(by_columns - by_rows * shape.row_tiles) * row_step,
              static_cast<int>(by_rows - number * call.dims.heads)};
    } else {
      return {call,
              unit,
              shape.row_tiles,
              shape.column_tiles,
              row_step,
              column_step,
              proper ? call.dims.chunks_per_segment : call.dims.chunks_per_piece};
    }
  }
  // Totals of the segment that ends the sequence are of no use. Of packed sequences those that others follow are
  // listed, in reverse time those that come after others are taken.
  __device__ bool skips(const Item& it) const {
    if constexpr (Packed) {
      if (proper) return !it.has_work();
      return it.low >= it.high || (reverse ? it.segment == 0 : it.high == it.chunks);
    } else {
      const int last = (it.chunks - 1) / call.dims.chunks_per_segment * call.dims.chunks_per_segment;
      return it.empty() || (!proper && (reverse ? it.segment < call.dims.pieces : it.low >= last));
    }
  }
  // Whether a chunk's tokens are added. After the last one only those who ask for the state at the end of the sequence
  // have a use for it.
  __device__ __forceinline__ bool adds(const Item& it, int chunk) const {
    if (!proper || (reverse ? chunk > it.low : chunk + 1 < it.high)) return true;
    if (reverse ? it.low > 0 : it.high < it.chunks) return false;
    return (reverse ? call.carried.dC0 : call.carried.C_last).data != nullptr ||
           (reverse ? call.carried.dn0 : call.carried.n_last).data != nullptr;
  }
  // The tile of an item among those of a state.
  __device__ int tile_of(const Item& it) const {
    return it.row / row_step * shape.column_tiles + it.column / column_step;
  }
  __device__ int blocks_per_chunk() const { return (call.dims.L + block_tokens - 1) / block_tokens; }
  __device__ unsigned full(int slot) const { return space + Space::full + 8 * slot; }
  __device__ unsigned empty(int slot) const { return space + Space::empty + 8 * slot; }
  __device__ unsigned gates(int slot) const { return space + Space::gates + slot * Space::gate_floats * 4; }
  __device__ unsigned half(int buffer, int warpgroup) const {
    return space + Space::buffer + (buffer * warpgroups + warpgroup) * Space::half_bytes;
  }

  template <class Work>
  __device__ void each_item(const Work& work) const {
    const auto take = [&](int unit) {
      const Item it = item(unit);
      if (!skips(it)) work(it);
    };
    if constexpr (Packed) {
      each_unit(call, !proper, shape.units, take);
    } else {
      for (int unit = blockIdx.x; unit < shape.items; unit += gridDim.x) take(unit);
    }
  }
};

}  // namespace tfla::cuda::sm90::states
