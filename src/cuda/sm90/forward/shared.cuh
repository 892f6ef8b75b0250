// Stages `states` and `outputs` in one kernel on Hopper: what its roles share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/common/segment.cuh"
#include "cuda/sm90/common/state_tile.cuh"
#include "cuda/sm90/common/tensor_map.h"

namespace tfla::cuda::sm90::forward {

constexpr int threads = 4 * warpgroup_threads;

// What a kernel has of dqk: all of it, or of more than 256 columns the first 256 or the rest. See forward_halves.cu.
enum class Half : std::uint8_t { both, first, last };

// Who does what. A wide state, 256 x 128, takes two warpgroups, half of the rows each; that leaves one for the outputs.
template <int M, int N>
struct Roles {
  static constexpr bool wide = M * N > 256;
  static constexpr int outputs = wide ? 1 : 2, carriers = wide ? 2 : 1;  // warpgroups
  static constexpr bool lean = M > 2;     // a thread of the state has 128 numbers of it: registers are short
  static constexpr int parts = carriers;  // Q and K of a block come and go in as many: each carrier has its own of K
};

// Whether n is handed over as three more columns of C: q.n then comes with Q C, and reads Q no second time. Kept states
// leave in panels of 64 columns, and a third one would not fit.
template <int M, int N, bool Normalized, bool Keep>
inline constexpr bool n_is_beside = Normalized && !Keep && M <= 2 && N == 128;

// Shared memory, in bytes from a 1,024-byte boundary. M: 64-column panels of Q and K. Beside: see n_is_beside.
template <int M, int N, bool Beside>
struct Space : Roles<M, N> {
  using Roles<M, N>::wide, Roles<M, N>::parts;
  static constexpr int slots = wide ? 2 : M > 2 ? 3 : 4;    // of Q, and of V with its gates
  static constexpr int k_slots = wide ? 3 : M > 2 ? 2 : 3;  // of parts of K
  static constexpr int part_panels = M / parts, part_bytes = part_panels * panel_bytes;
  static constexpr int k_bytes = M * panel_bytes, v_bytes = N / 64 * panel_bytes;
  static constexpr int q_bytes = k_bytes > v_bytes ? k_bytes : v_bytes;  // H is staged there
  // C in panels; with n beside it, in groups of eight columns (arch::groups_descriptor), of which n has the last.
  static constexpr int group_bytes = 64 * M * 16;
  static constexpr int c_bytes = Beside ? (N / 8 + 1) * group_bytes : M * N / 64 * panel_bytes;
  // Gate vectors of a block.
  static constexpr int u = 0, c = u + 8 * block_tokens, qbar = c + 8 * block_tokens, abar = qbar + 4 * block_tokens;
  static constexpr int floor = abar + 4 * block_tokens, decay = floor + 4 * block_tokens, gate_bytes = decay + 16;

  static constexpr int q = 0, k = q + slots * q_bytes, v = k + k_slots * part_bytes, state = v + slots * v_bytes;
  // n for each warpgroup of outputs, in three terms: rows of a product's operand of eight, where that has room.
  static constexpr bool n_rows = wide || M <= 2;
  static constexpr int n = state + c_bytes, n_panel = n_rows ? 1024 : 128;
  static constexpr int n_part = n_rows ? 128 : M * n_panel;
  static constexpr int n_bytes = Beside ? 0 : n_rows ? M * n_panel : 3 * n_part;
  static constexpr int gates = n + Roles<M, N>::outputs * n_bytes, rows = gates + slots * gate_bytes;
  static constexpr int inverse = 0, slope = 4 * block_tokens, row_bytes = 8 * block_tokens;  // 1 / den and its slope
  static constexpr int barriers = rows + slots * row_bytes;
  static constexpr int q_full = barriers, q_empty = q_full + 8 * slots * parts;
  static constexpr int k_full = q_empty + 8 * slots * parts, k_empty = k_full + 8 * k_slots;
  static constexpr int v_full = k_empty + 8 * k_slots, v_empty = v_full + 8 * slots;
  static constexpr int c_full = v_empty + 8 * slots, c_empty = c_full + 16;  // c_full: one per outputs' warpgroup
  static constexpr int bytes = c_empty + 8 + 1024;
  // float16: what the readers of C and n multiply by, for each warpgroup of outputs; the largest numbers of warps.
  static constexpr int lifts = (c_empty + 8 + 15) / 16 * 16, largest = lifts + 16;
  static constexpr int lifted_bytes = largest + 2 * 8 * 4 * Roles<M, N>::carriers + 1024;
};

// Of a thread, by what it does: 512 for one thread of each warpgroup. Found by trial, so that nothing spills.
template <class T, int M, int N, bool Normalized, bool Keep, bool Packed, Time Direction, Half Dqk>
struct Registers {
  using Roles = forward::Roles<M, N>;
  static constexpr bool tall = M > 2 && N == 64;  // all rows of a state of dqk above 128 in one warpgroup
  // Outputs of wide states need more of them.
  static constexpr bool more = (Packed && Direction == Time::forward) || needs_scale16<T> || Dqk != Half::both;
  static constexpr int outputs = Roles::wide    ? (Dqk == Half::last && !Normalized ? 152
                                                   : more                           ? 144
                                                                                    : 136)
                                 : tall && Keep ? 128
                                 : N == 64      ? (Normalized ? 136 : 144)
                                 : M == 1       ? 160
                                                : 144;
  static constexpr int state = Roles::wide              ? (more ? 168 : 176)
                               : tall && Keep           ? 216
                               : N == 64                ? (Normalized ? 200 : 184)
                               : M == 1                 ? 152
                               : needs_scale16<T> && Packed ? 192
                                                        : 184;
  static constexpr int movers = 512 - Roles::outputs * outputs - Roles::carriers * state;
};

struct Maps {
  CUtensorMap q, k, v, h, states;
};
struct PackedMaps : Maps {
  CUtensorMap nothing;
};

struct Shape {
  int column_tiles, items;
  int kept_shift, kept_chunks;  // log2 of the blocks between kept states, and how many of these a sequence has
  int blocks;                   // the size of the grid; from here it and the next take no registers (Roles::lean)
  float scale, eps;
};
struct PackedShape : Shape {
  Units units;
  Divider by_tiles, by_heads;
};

// The blocks of 64 tokens of one segment, and the columns.
struct DenseItem {
  int tile, head, segment, chunks, low, high;
  int sequence;
  unsigned unit;

  __device__ DenseItem(const Call<float>& call, const Shape& shape, unsigned number) : unit(number) {
    const int column_tiles = shape.column_tiles;
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

// The same of packed sequences, blocks of 64 tokens being chunks. rest: a unit without its tile.
struct PackedItem : Segment {
  int tile, head;
  unsigned unit;

  __device__ __forceinline__ PackedItem(const Call<float>& call, const PackedShape& shape, int segment, int rest,
                                        int number)
      : Segment(call, segment, block_tokens),
        tile(number - rest * shape.column_tiles),
        head(rest - segment * call.dims.heads),
        unit(static_cast<unsigned>(number)) {}
  __device__ __forceinline__ PackedItem(const Call<float>& call, const PackedShape& shape, int rest, int number)
      : PackedItem(call, shape, static_cast<int>(shape.by_heads.quotient(rest)), rest, number) {}
  __device__ __forceinline__ PackedItem(const Call<float>& call, const PackedShape& shape, unsigned number)
      : PackedItem(call, shape, static_cast<int>(shape.by_tiles.quotient(number)), static_cast<int>(number)) {}
};

// What every thread of a block knows.
template <class T, int M, int N, bool Normalized, bool Keep, bool Packed, Time Direction, Half Dqk>
struct Block {
  using Item = std::conditional_t<Packed, PackedItem, DenseItem>;
  using Maps = std::conditional_t<Packed, PackedMaps, forward::Maps>;
  using Shape = std::conditional_t<Packed, PackedShape, forward::Shape>;
  static constexpr bool beside = n_is_beside<M, N, Normalized, Keep>;
  using Space = forward::Space<M, N, beside>;
  static constexpr bool lean = Space::lean || Packed;  // as Roles::lean; packed sequences take registers too
  static constexpr bool lifted = needs_scale16<T>;
  static constexpr bool reverse = Direction == Time::reverse;  // dC and dV: see reverse.cu
  static_assert(!lifted || !Keep, "no states of float16 are kept: keeps_hopper_states");
  static_assert(!reverse || (Keep && !Normalized), "nobody asks for anything else");
  static_assert(Dqk == Half::both || (Space::wide && !lifted && !Keep && !Packed && !reverse), "nor do they for these");
  // In pairs where n or a second term of keys comes with them; with 64 rows it spills.
  static constexpr bool pairs = !lifted && (Space::wide ? Normalized || Keep : Keep && M == 2);
  static constexpr auto terms = !Keep ? Terms::one : pairs ? Terms::two : Terms::two_in_turn;
  // Where registers are left.
  static constexpr bool ahead = M <= 2 && N == 128 && !lifted && !Keep;
  // Whether outputs add Q C to P V as it is, everything being divided by qbar till the end. Then P V does not wait for
  // the state, and Q C needs no multiplications behind it.
  static constexpr bool factored = ahead;
  // Kept states have room for both terms of keys in two sets of registers.
  // Lifts and packed sequences together leave registers for the operands of 64 rows at a time.
  using Tile =
      std::conditional_t<pairs || Space::wide,
                         StateTile<T, Space::part_panels, N, terms, 1, Keep || lifted ? 2 : 3, pairs, !reverse, ahead>,
                         StateTile<T, M, N, terms, (M > 1 && !(lifted && Packed) ? 2 : 1), 2, false, !reverse, ahead>>;
  static constexpr auto depth = arch::Major::depth, across = arch::Major::across;
  using Slots = Ring<Space::slots>;  // of Q and of V, which go round together
  using KeySlots = Ring<Space::k_slots>;

  const Call<float>& call;
  const Maps& maps;
  const Shape& shape;
  unsigned space;

  __device__ unsigned at(int offset, int slot = 0, int step = 8) const { return space + offset + slot * step; }
  template <class Work>
  __device__ void each_item(const Work& work) const {
    const auto take = [&](int unit) {
      const Item it(call, shape, unit);
      if (it.has_work()) work(it);
    };
    if constexpr (Packed) {
      each_unit(call, false, shape.units, take);
    } else {
#pragma unroll 1
      for (int unit = blockIdx.x; unit < shape.items; unit += lean ? shape.blocks : static_cast<int>(gridDim.x))
        take(unit);
    }
  }

  // The blocks of an item, in the order of time: from first(it) on, by `step`.
  static constexpr int step = reverse ? -1 : 1;
  __device__ __forceinline__ static int first(const Item& it, int later = 0) {
    return reverse ? it.high - 1 - later : it.low + later;
  }

  // The blocks of one warpgroup of outputs: all, or every other one, counted over all items.
  template <class Work>
  __device__ void each_block(int warpgroup, const Work& work) const {
    int turn = 0;
    each_item([&](const Item& it) {
#pragma unroll 1
      for (int block = first(it, Space::outputs == 2 ? (warpgroup ^ turn) & 1 : 0);
           (reverse ? block >= it.low : block < it.high); block += step * Space::outputs)
        work(it, block);
      turn += it.high - it.low;
    });
  }

  // What the first half of dqk leaves for the last: O of a block as the threads of outputs have it, and q.n of its
  // rows.
  static constexpr int o_floats = block_tokens * N, dqk_partial_floats = o_floats + block_tokens;
  __device__ __forceinline__ float* left_by_half(const Item& it, int block) const {
    const int number = static_cast<int>(it.unit) * call.dims.chunks_per_segment + block - it.low;
    return call.stored.dqk_partials + static_cast<std::int64_t>(number) * dqk_partial_floats;
  }

  // Named barriers. H of a block is staged in a slot of Q, which has a barrier of its own: outputs, which only arrive
  // there, may be done with their next block before the warp that stores H has come for this one. They cannot be with
  // the next one in the same slot, since its Q is loaded when H has left.
  __device__ static int staged_barrier(int slot) { return 4 + slot; }
  __device__ static int warps_barrier(int warpgroup) { return 1 + warpgroup; }
  static constexpr int state_barrier = 3;

  // Before its first block a sequence without an initial state has none: C and n are zero. Wide states are multiplied
  // by all the same: their product is begun before the scores are gated, and products must not end in a branch.
  __device__ __forceinline__ bool is_fresh(const Item& it, int block) const {
    if (Space::lean) return false;
    return call.carried.C0.data == nullptr && (reverse ? block + 1 == it.chunks : block == 0);
  }
  // Such a state is not handed over where nobody keeps it.
  static constexpr bool skips_fresh = !Keep && !Space::wide;
  // Whether the state after a block has a reader. Carriers of packed wide heads with n have no register for the
  // question.
  __device__ __forceinline__ bool is_last_wanted(const Item& it, int block) const {
    if (Space::wide && Packed && Normalized) return true;
    if (reverse ? block > it.low : block + 1 < it.high) return true;
    return call.carried.C_last.data != nullptr && (reverse ? block == 0 : it.high == it.chunks);
  }

  // States are those before the block in the order of time: C at the start of a chunk, dC at its end.
  __device__ __forceinline__ bool is_kept(const Item& it, int block) const {
    const int last = (1 << shape.kept_shift) - 1;
    if constexpr (reverse) return (block & last) == last || block + 1 == it.chunks;
    return (block & last) == 0;
  }
  __device__ __forceinline__ int kept_unit(const Item& it, int block) const {
    if constexpr (Packed) {  // as first_chunk, with kept chunks
      const int first = (it.start >> shape.kept_shift) / block_tokens + it.sequence;
      return (first + (block >> shape.kept_shift)) * call.dims.heads + it.head;
    }
    return (it.sequence * shape.kept_chunks + (block >> shape.kept_shift)) * call.dims.heads + it.head;
  }
};

}  // namespace tfla::cuda::sm90::forward
