// Forward on Hopper: what a CTA works on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/common/segment.cuh"
#include "cuda/sm90/forward/shared.cuh"

namespace tfla::cuda::sm90::forward {

inline constexpr int checkpoint_blocks = hopper::checkpoint / token_block;  // token blocks between checkpoints

struct Maps {
  CUtensorMap q, k, v, h, states;
  CUtensorMap factors;  // dQ and dK: q or k, which are multiplied with them
};
struct EpilogueMaps : Maps {
  CUtensorMap z, ungated;
};

// What a launch adds to the call.
struct Work {
  int column_tiles, items;
  int kept_shift, kept_chunks;  // log2 of the token blocks between kept states; kept states of a sequence
  int ctas;                     // the size of the grid; read from here, it takes no register, nor do the next two
  float scale, eps;
  Strided factors;  // of Maps::factors
};
struct PackedWork : Work {
  Units units;
  Divider by_tiles, by_heads;
};
template <class Base>
struct EpilogueWork : Base {
  const float* D;  // [H,dhv], or null
  bool has_z, has_ungated;
};

// One item of work: a column tile of a head over one segment of a sequence, token blocks [low, high).
struct DenseItem {
  int tile, head, segment, chunks, low, high;
  int sequence;
  unsigned unit;

  __device__ DenseItem(const Call<float>& call, const Work& work, unsigned number) : unit(number) {
    const int column_tiles = work.column_tiles;
    tile = static_cast<int>(number % column_tiles);
    number /= column_tiles;
    head = static_cast<int>(number % call.dims.heads);
    number /= call.dims.heads;
    sequence = static_cast<int>(number % call.dims.sequences);
    segment = static_cast<int>(number / call.dims.sequences);
    chunks = call.dims.chunks_per_row;
    low = min(segment * call.dims.chunks_per_segment, chunks);
    high = min(low + call.dims.chunks_per_segment, chunks);
  }
  __device__ bool has_work() const { return low < high; }
  // As Segment has them.
  __device__ int map_token(const Call<float>& /*call*/) const { return 0; }
  __device__ int map_batch(const Call<float>& /*call*/) const { return sequence; }
  __device__ std::int64_t tokens(const Call<float>& call) const { return call.dims.tokens; }
};

// The same for packed sequences, whose chunks are token blocks. rest: a unit without its tile.
struct PackedItem : Segment {
  int tile, head;
  unsigned unit;

  __device__ __forceinline__ PackedItem(const Call<float>& call, const PackedWork& work, int segment, int rest,
                                        int number)
      : Segment(call, segment, token_block),
        tile(number - rest * work.column_tiles),
        head(rest - segment * call.dims.heads),
        unit(static_cast<unsigned>(number)) {}
  __device__ __forceinline__ PackedItem(const Call<float>& call, const PackedWork& work, int rest, int number)
      : PackedItem(call, work, static_cast<int>(work.by_heads.quotient(rest)), rest, number) {}
  __device__ __forceinline__ PackedItem(const Call<float>& call, const PackedWork& work, unsigned number)
      : PackedItem(call, work, static_cast<int>(work.by_tiles.quotient(number)), static_cast<int>(number)) {}
};

// What the first part of dqk leaves for the last, for a token block: O as the threads of the output warpgroup hold it,
// then q.n of its rows.
template <class C>
struct DqkPartial {
  static constexpr int o_floats = token_block * C::columns, floats = o_floats + token_block;
};

// dQ and dK: the rows of a token block, as the load warp hands them to the outputs.
struct RowPlace {
  int sequence, token;  // of the batch and the first token in it; packed: 0 and the token
  int head;
  int inside_and_tile;  // rows that there are, and the tile from bit 8 on

  __device__ __forceinline__ void write(unsigned place) const {
    arch::write_quad(place + PlaceOffsets::rows, {static_cast<unsigned>(sequence), static_cast<unsigned>(token),
                                                  static_cast<unsigned>(head), static_cast<unsigned>(inside_and_tile)});
  }
  __device__ __forceinline__ static RowPlace read(unsigned place) {
    const uint4 x = arch::read_quad(place + PlaceOffsets::rows);
    return {static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z), static_cast<int>(x.w)};
  }
  [[nodiscard]] __device__ __forceinline__ int inside() const { return inside_and_tile & 255; }
  [[nodiscard]] __device__ __forceinline__ int tile() const { return inside_and_tile >> 8; }
};

// What every thread of a CTA knows.
template <class C>
struct Cta {
  using Item = std::conditional_t<C::packed, PackedItem, DenseItem>;
  using DenseMaps = std::conditional_t<C::epilogue, EpilogueMaps, forward::Maps>;
  using Maps = MapsFor<DenseMaps, C::packed>;
  using PlainWork = std::conditional_t<C::packed, PackedWork, forward::Work>;
  using Work = std::conditional_t<C::epilogue, EpilogueWork<PlainWork>, PlainWork>;
  using Slots = Ring<Shared<C>::slots>;  // of Q and of V, which go round together
  using KeySlots = Ring<Shared<C>::k_slots>;
  // Index of a number per token and head. The plan sees to it that columns of token blocks can be counted in 32 bits,
  // and a split state has more than 64 columns.
  using Index = std::conditional_t<C::split_state, int, std::int64_t>;
  using Token = std::conditional_t<C::few_registers, int, std::int64_t>;

  const Call<float>& call;
  const Maps& maps;
  const Work& work;
  Shared<C> shared;

  template <class Visit>
  __device__ void each_item(const Visit& visit) const {
    const auto take = [&](int unit) {
      const Item it(call, work, unit);
      if (it.has_work()) visit(it);
    };
    if constexpr (C::packed) {
      each_unit(call, false, work.units, take);
    } else {
#pragma unroll 1
      for (int unit = blockIdx.x; unit < work.items; unit += C::few_registers ? work.ctas : static_cast<int>(gridDim.x))
        take(unit);
    }
  }

  // The token blocks of an item in the order of time: from first(it) on, by `step`.
  static constexpr int step = C::reverse ? -1 : 1;
  __device__ __forceinline__ static int first(const Item& it, int later = 0) {
    return C::reverse ? it.high - 1 - later : it.low + later;
  }

  // The token blocks of one output warpgroup: all, or every other one, counted over all items.
  template <class Visit>
  __device__ void each_block(int warpgroup, const Visit& visit) const {
    int turn = 0;
    each_item([&](const Item& it) {
#pragma unroll 1
      for (int block = first(it, C::output_warpgroups == 2 ? (warpgroup ^ turn) & 1 : 0);
           (C::reverse ? block >= it.low : block < it.high); block += step * C::output_warpgroups)
        visit(it, block);
      turn += it.high - it.low;
    });
  }

  // Where the gate vectors of an item's sequence and head begin.
  __device__ __forceinline__ Index vectors(const Item& it) const {
    const Index head = static_cast<Index>(it.head) * static_cast<Index>(call.dims.all_tokens());
    if constexpr (C::packed) return head + it.start;
    return head + static_cast<Index>(it.sequence) * static_cast<Index>(call.dims.tokens);
  }

  __device__ __forceinline__ float* dqk_partial(const Item& it, int block) const {
    const int number = static_cast<int>(it.unit) * call.dims.chunks_per_segment + block - it.low;
    return call.stored.dqk_partials + static_cast<std::int64_t>(number) * DqkPartial<C>::floats;
  }

  // Whether C = 0 and n = 0 before a token block: see Config::skips_fresh.
  __device__ __forceinline__ bool is_fresh(const Item& it, int block) const {
    if (C::large_dqk) return false;
    return call.carried.C0.data == nullptr && (C::reverse ? block + 1 == it.chunks : block == 0);
  }
  // Whether anything reads the state after a token block.
  __device__ __forceinline__ bool is_last_wanted(const Item& it, int block) const {
    if (!C::skips_last) return true;
    if (C::reverse ? block > it.low : block + 1 < it.high) return true;
    if (C::grad_qk && (C::reverse ? it.low == 0 : it.high == it.chunks) && is_checkpoint(it, C::reverse ? 0 : it.high))
      return true;
    return call.carried.C_last.data != nullptr && (C::reverse ? block == 0 : it.high == it.chunks);
  }

  // dQ and dK: whether <C, dC> is made at the start of a token block, or at the end of the last one. At the ends of a
  // sequence it is zero, unless a caller gives a state or its gradient.
  __device__ __forceinline__ bool is_checkpoint(const Item& it, int block) const {
    if (block == 0) return (C::reverse ? call.carried.C_last : call.carried.C0).data != nullptr;
    if (block == it.chunks) return call.carried.dC_last.data != nullptr;
    return block % checkpoint_blocks == 0;
  }
  static constexpr int checkpoint_bytes = 64 * C::dqk_panels * C::columns * 2;
  __device__ __forceinline__ std::byte* checkpoint_state(int number) const {
    return static_cast<std::byte*>(call.stored.checkpoints) + static_cast<std::int64_t>(number) * checkpoint_bytes;
  }
  // Its number, with the heads and tiles.
  __device__ __forceinline__ int checkpoint(const Item& it, int block) const {
    std::int64_t start = 0;
    if constexpr (C::packed) start = it.start;
    const auto first = static_cast<int>(call.dims.first_checkpoint(it.sequence, start, hopper::checkpoint));
    const int own = (block + checkpoint_blocks - 1) / checkpoint_blocks;
    return ((first + own) * call.dims.heads + it.head) * work.column_tiles + it.tile;
  }

  // Whether the state before a token block, in the order of time, is kept: C at the start of a chunk, dC at its end.
  __device__ __forceinline__ bool is_kept(const Item& it, int block) const {
    const int last = (1 << work.kept_shift) - 1;
    if constexpr (C::reverse) return (block & last) == last || block + 1 == it.chunks;
    return (block & last) == 0;
  }
  __device__ __forceinline__ int kept_unit(const Item& it, int block) const {
    if constexpr (C::packed) {  // as first_chunk, with kept chunks
      const int first = (it.start >> work.kept_shift) / token_block + it.sequence;
      return (first + (block >> work.kept_shift)) * call.dims.heads + it.head;
    }
    return (it.sequence * work.kept_chunks + (block >> work.kept_shift)) * call.dims.heads + it.head;
  }
};

}  // namespace tfla::cuda::sm90::forward
