// Stages `states` and `outputs` in one kernel on Hopper: what its roles share.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/segment.cuh"
#include "cuda/sm90/state_tile.cuh"
#include "cuda/sm90/tensor_map.h"

namespace tfla::cuda::sm90::forward {

constexpr int threads = 4 * warpgroup_threads;

// Shared memory, in bytes from a 1,024-byte boundary. M: 64-column panels of Q and K.
template <int M, int N>
struct Space {
  static constexpr int slots = M > 2 ? 3 : 4, k_slots = M > 2 ? 2 : 3;  // of Q and of V with its gates; of K
  static constexpr int k_bytes = M * panel_bytes, v_bytes = N / 64 * panel_bytes;
  static constexpr int q_bytes = k_bytes > v_bytes ? k_bytes : v_bytes;  // H is staged there
  static constexpr int c_bytes = M * N / 64 * panel_bytes;
  // Gate vectors of a block.
  static constexpr int u = 0, c = u + 8 * block_tokens, qbar = c + 8 * block_tokens, abar = qbar + 4 * block_tokens;
  static constexpr int floor = abar + 4 * block_tokens, decay = floor + 4 * block_tokens, gate_bytes = decay + 16;

  static constexpr int q = 0, k = q + slots * q_bytes, v = k + k_slots * k_bytes, state = v + slots * v_bytes;
  static constexpr int n = state + c_bytes, n_part = 2 * 64 * M, n_bytes = 3 * n_part;  // twice
  static constexpr int gates = n + 2 * n_bytes, rows = gates + slots * gate_bytes;
  static constexpr int inverse = 0, slope = 4 * block_tokens, row_bytes = 8 * block_tokens;  // 1 / den and its slope
  static constexpr int barriers = rows + slots * row_bytes;
  static constexpr int q_full = barriers, q_empty = q_full + 8 * slots;
  static constexpr int k_full = q_empty + 8 * slots, k_empty = k_full + 8 * k_slots;
  static constexpr int v_full = k_empty + 8 * k_slots, v_empty = v_full + 8 * slots;
  static constexpr int c_full = v_empty + 8 * slots, c_empty = c_full + 16;  // c_full: one per outputs' warpgroup
  static constexpr int bytes = c_empty + 8 + 1024;
};

// Of a thread, by what it does: 512 for one thread of each warpgroup. Found by trial, so that nothing spills.
template <int M, int N, bool Normalized>
struct Registers {
  static constexpr int outputs = N == 64 ? (Normalized ? 136 : 144) : M == 1 ? 160 : 144;
  static constexpr int state = N == 64 ? (Normalized ? 200 : 184) : M == 1 ? 152 : 184;
  static constexpr int movers = 512 - 2 * outputs - state;
};

struct Maps {
  CUtensorMap q, k, v, h, states;
};

struct Shape {
  int column_tiles, units;      // units: heads and column tiles of a segment
  int kept_shift, kept_chunks;  // log2 of the blocks between kept states, and how many of these a sequence has
  Divider by_tiles, by_heads, by_sequences;
};

// The blocks of 64 tokens of one segment, as chunks, and the columns. rest: a unit without its tile.
struct Item : Segment {
  int tile, head;

  __device__ __forceinline__ Item(const Call<float>& call, const Shape& shape, int segment, int rest, int unit)
      : Segment(call, shape.by_sequences, segment, block_tokens),
        tile(unit - rest * shape.column_tiles),
        head(rest - segment * call.heads) {}
  __device__ __forceinline__ Item(const Call<float>& call, const Shape& shape, int rest, int unit)
      : Item(call, shape, static_cast<int>(shape.by_heads.quotient(rest)), rest, unit) {}
  __device__ __forceinline__ Item(const Call<float>& call, const Shape& shape, int unit)
      : Item(call, shape, static_cast<int>(shape.by_tiles.quotient(unit)), unit) {}
};

// What every thread of a block knows.
template <int M, int N, bool Normalized, bool Keep>
struct Block {
  using Space = forward::Space<M, N>;
  using Tile = StateTile<M, N, Keep ? Terms::two_in_turn : Terms::one>;
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
    each_unit(call, false, shape.units, [&](int unit) {
      const Item it(call, shape, unit);
      if (it.has_work()) work(it);
    });
  }

  // The blocks of one warpgroup of outputs: every other one, counted over all items.
  template <class Work>
  __device__ void each_block(int warpgroup, const Work& work) const {
    int turn = 0;
    each_item([&](const Item& it) {
      int block = it.low + ((warpgroup ^ turn) & 1);
      turn ^= it.high - it.low;
#pragma unroll 1
      for (; block < it.high; block += 2) work(it, block);
    });
  }

  // Named barriers.
  __device__ static int staged_barrier(int warpgroup) { return 3 + warpgroup; }
  __device__ static int warps_barrier(int warpgroup) { return 1 + warpgroup; }

  __device__ __forceinline__ bool is_kept(int block) const { return (block & ((1 << shape.kept_shift) - 1)) == 0; }
  __device__ __forceinline__ int kept_unit(const Item& it, int block) const {
    const int first = call.chunks_per_row > 0  // as first_chunk, with kept chunks
                          ? it.sequence * shape.kept_chunks
                          : (it.start >> shape.kept_shift) / block_tokens + it.sequence;
    return (first + (block >> shape.kept_shift)) * call.heads + it.head;
  }
};

}  // namespace tfla::cuda::sm90::forward
