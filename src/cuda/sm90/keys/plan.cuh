// Stage `keys` on Hopper: the call as its kernel sees it, tiles, shared memory and barriers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/divider.h"
#include "cuda/sm90/gradients/plan.cuh"
#include "cuda/sm90/tensor_map.h"

namespace tfla::cuda::sm90::keys {

using gradients::chunk;
using gradients::consumer_registers;
using gradients::half;
using gradients::half_bytes;
using gradients::last_tile;
using gradients::producer_registers;
using gradients::row_bytes;
using gradients::slot_bytes;
using gradients::threads;
using gradients::warpgroup;

inline constexpr int columns = 128;  // of dqk in a tile
inline constexpr int column_panels = columns / panel;
inline constexpr int warps_of_consumer = warpgroup / 32;

struct Maps {
  CUtensorMap q, k, v, dh;  // boxes of 128 tokens
  CUtensorMap dq, dk;       // of 64
  CUtensorMap C, dC;        // of 128 rows of a state
};

// The rest of the call.
struct Work {
  const float2* u;
  const float2* c;
  const float* inverse;
  const double* b;
  const double* m_start;
  const double* m_end;
  float* row_sums;
  float* column_sums;
  float* outflow;
  float scale;  // above zero: its logarithm is taken
  int heads, chunks_per_row, tokens, all_tokens;
  int parts;        // of dqk
  int dhv_panels;   // of 64 columns of dhv
  int part_vector;  // length of the row sums of a part
  Divider by_parts, by_heads, by_chunks_per_row;
  unsigned tiles;
};

// A chunk of a head, and 128 columns of dqk. Parts are neighbours: V and dH come from L2 for all but the first.
struct Tile {
  int part;
  int state;  // number of the (chunk, head)
  int head;
  int batch;
  int token;   // first one, in its row of the batch
  int length;  // tokens; those beyond are zero in every operand, and not stored
  int at;      // where vectors begin

  __device__ __forceinline__ Tile(const Work& work, unsigned index) {
    state = static_cast<int>(work.by_parts.quotient(index));
    part = static_cast<int>(index) - state * work.parts;
    const auto number = static_cast<int>(work.by_heads.quotient(state));
    head = state - number * work.heads;
    batch = static_cast<int>(work.by_chunks_per_row.quotient(number));
    token = (number - batch * work.chunks_per_row) * chunk;
    length = min(chunk, work.tokens - token);
    at = head * work.all_tokens + batch * work.tokens + token;
  }
};

// A panel of 64 columns of dhv in shared memory.
enum Slot : int { slot_v, slot_dh, slot_dC, slot_C, panel_slots };

struct Plan {
  static constexpr int stages = 2;  // panels on the chip
  static constexpr unsigned stage_bytes = panel_slots * slot_bytes;

  static constexpr unsigned q = 0;
  static constexpr unsigned k = q + column_panels * slot_bytes;
  static constexpr unsigned ds = k + column_panels * slot_bytes;  // [keys][queries], queries in halves; dQ leaves here
  static constexpr unsigned ring = ds + 2 * slot_bytes;
  static constexpr unsigned u = ring + stages * stage_bytes;  // float2, with log2(scale / den) in it
  static constexpr unsigned c = u + chunk * 8;                // float2
  static constexpr unsigned inflow = c + chunk * 8;           // float2: qbar = exp_sum(u, inflow)
  static constexpr unsigned outflow = inflow + 8;             // float2: abar = exp_sum(c, outflow)
  static constexpr unsigned vectors = outflow + 8;            // int2: where row sums begin, tokens (+ last_tile)
  static constexpr unsigned barriers = vectors + 8;
};

// `full` ones are waited for by consumers, `empty` ones by producers (ds_empty by consumers), `staged` ones by the
// store warp.
struct Barriers {
  static constexpr int ring_slots = Plan::stages * panel_slots;
  static constexpr int count = 9 + 2 * ring_slots;
  unsigned base;

  __device__ __forceinline__ unsigned at(int index) const { return base + 8 * index; }
  __device__ __forceinline__ unsigned q_full() const { return at(0); }
  __device__ __forceinline__ unsigned q_empty() const { return at(1); }
  __device__ __forceinline__ unsigned k_full() const { return at(2); }
  __device__ __forceinline__ unsigned k_empty() const { return at(3); }
  __device__ __forceinline__ unsigned gates_full() const { return at(4); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(5); }
  __device__ __forceinline__ unsigned ds_empty() const { return at(6); }
  __device__ __forceinline__ unsigned dk_staged() const { return at(7); }
  __device__ __forceinline__ unsigned dq_staged() const { return at(8); }
  __device__ __forceinline__ unsigned ring_full(int slot) const { return at(9 + slot); }
  __device__ __forceinline__ unsigned ring_empty(int slot) const { return at(9 + ring_slots + slot); }

  // By one thread. Consumer 0 leaves its dK in Q and consumer 1 in K: there the store warp arrives for it.
  __device__ void init() const {
    constexpr int consumer_warps = 2 * warps_of_consumer;
    arch::barrier_init(gates_full(), 32);
    for (const unsigned full : {q_full(), k_full()}) arch::barrier_init(full, 1);
    for (const unsigned empty : {q_empty(), k_empty()}) arch::barrier_init(empty, warps_of_consumer + 1);
    arch::barrier_init(gates_empty(), consumer_warps);
    arch::barrier_init(ds_empty(), 1);
    for (const unsigned staged : {dk_staged(), dq_staged()}) arch::barrier_init(staged, consumer_warps);
    for (int slot = 0; slot < ring_slots; ++slot) {
      arch::barrier_init(ring_full(slot), 1);
      arch::barrier_init(ring_empty(slot), consumer_warps);
    }
    arch::barriers_ready();
  }
};

inline constexpr unsigned shared_bytes = Plan::barriers + 8 * Barriers::count;
static_assert(shared_bytes <= 232448, "what a block may have");

}  // namespace tfla::cuda::sm90::keys
