// Stage `gradients` on Hopper: the call as its kernel sees it, tiles, shared memory and barriers.
#pragma once

#include <cuda.h>

#include <bit>
#include <cstdint>

#include "cuda/arch/barrier.cuh"
#include "cuda/call.h"
#include "cuda/sm90/divider.h"
#include "cuda/sm90/tensor_map.h"

namespace tfla::cuda::sm90::gradients {

inline constexpr int chunk = 128;                 // tokens of a tile
inline constexpr int half = 64;                   // keys, and queries, of a consumer
inline constexpr unsigned row_bytes = 2 * panel;  // of a panel in shared memory
inline constexpr unsigned slot_bytes = chunk * row_bytes;
inline constexpr unsigned half_bytes = half * row_bytes;
inline constexpr int last_tile = 256;  // added to the tokens of a block's last tile: what consumers know of the grid
inline constexpr int warpgroup = 128;
inline constexpr int threads = 3 * warpgroup;
inline constexpr int consumer_warps = 8;
// 504 in all: what 384 threads at 168 own.
inline constexpr int producer_registers = 24, consumer_registers = 240;

struct Maps {
  CUtensorMap q, k, v, dh, dk, dv;  // boxes of 128 tokens
  CUtensorMap dq;                   // of 64
  CUtensorMap C, dC;                // of all rows of a state
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
  const Chunk* chunks;  // of packed sequences; null: a dense batch
  float scale;          // above zero: its logarithm is taken
  int heads, chunks_per_row, tokens, all_tokens;
  Divider by_heads, by_chunks_per_row;
  unsigned tiles;
};

// A chunk of a head. Heads of a chunk are neighbours: they lie side by side in memory.
struct Tile {
  int head;
  int state;         // number of the (chunk, head)
  int batch, token;  // of its first token, as a token_map has them
  int length;        // tokens; those beyond are zero in every operand, and not stored
  int at;            // where vectors begin

  __device__ __forceinline__ Tile(const Work& work, unsigned index) : state(static_cast<int>(index)) {
    const auto number = static_cast<int>(work.by_heads.quotient(index));
    head = state - number * work.heads;
    if (work.chunks != nullptr) {  // to the map a chunk is a sequence of its own, and ends as one
      const auto start = static_cast<int>(work.chunks[number].packed);
      length = work.chunks[number].length;
      batch = start + length;
      token = work.tokens - length;
      at = head * work.all_tokens + start;
      return;
    }
    batch = static_cast<int>(work.by_chunks_per_row.quotient(number));
    token = (number - batch * work.chunks_per_row) * chunk;
    length = min(chunk, work.tokens - token);
    at = head * work.all_tokens + batch * work.tokens + token;
  }
};

// The tiles of this block: every gridDim.x-th one, without the empty ones among packed sequences' chunks.
__device__ __forceinline__ unsigned next_tile(const Work& work, unsigned index) {
  if (work.chunks != nullptr) {
    while (index < work.tiles && work.chunks[work.by_heads.quotient(index)].length == 0) index += gridDim.x;
  }
  return index;
}
__device__ __forceinline__ unsigned first_tile(const Work& work) { return next_tile(work, blockIdx.x); }
__device__ __forceinline__ unsigned tile_after(const Work& work, unsigned index) {
  return next_tile(work, index + gridDim.x);
}

// Panels of 64 columns that dqk and dhv take.
template <int Dqk, int Dhv>
struct Panels {
  static constexpr int dqk = Dqk, dhv = Dhv;
};

// Items of the ring in a tile: dC_0, V_0, dC_1, V_1, ..., C_0, C_1, ..., and two slots that stay empty for dS.
template <class Size>
struct Plan {
  static constexpr int ring_slots = 6;  // all of C and dS for dhv 256
  static constexpr int ring_items = 3 * Size::dhv + 2;
  static constexpr int even_factor = std::countr_zero(static_cast<unsigned>(ring_items));
  static constexpr int dk_slot = Size::dhv - Size::dqk;  // dK leaves through the last slots of dH
  static_assert(dk_slot >= 0);

  static constexpr unsigned q = 0;
  static constexpr unsigned k = q + Size::dqk * slot_bytes;
  static constexpr unsigned dh = k + Size::dqk * slot_bytes;
  static constexpr unsigned ring = dh + Size::dhv * slot_bytes;
  static constexpr unsigned u = ring + ring_slots * slot_bytes;  // float2, with log2(scale / den) in it
  static constexpr unsigned c = u + chunk * 8;                   // float2
  static constexpr unsigned inflow = c + chunk * 8;              // float2: qbar = exp_sum(u, inflow)
  static constexpr unsigned outflow = inflow + 8;                // float2: abar = exp_sum(c, outflow)
  static constexpr unsigned vectors = outflow + 8;               // int2: where vectors begin, tokens (+ last_tile)
  static constexpr unsigned barriers = vectors + 8;
};

// Barriers of a tile. `full` ones are waited for by consumers, `empty` ones by producers, `staged` ones by the store
// warp.
template <class Size>
struct Barriers {
  static constexpr int ring_slots = Plan<Size>::ring_slots, dh_slots = Size::dhv;
  static constexpr int jobs = Size::dhv + 2;  // of the store warp: panels of dV, dK, dQ
  static constexpr int dk_job = Size::dhv, dq_job = Size::dhv + 1;
  static constexpr int count = 6 + 2 * dh_slots + 2 * ring_slots + jobs;
  unsigned base;

  __device__ __forceinline__ unsigned at(int index) const { return base + 8 * index; }
  __device__ __forceinline__ unsigned q_full() const { return at(0); }
  __device__ __forceinline__ unsigned q_empty() const { return at(1); }
  __device__ __forceinline__ unsigned k_full() const { return at(2); }
  __device__ __forceinline__ unsigned k_empty() const { return at(3); }
  __device__ __forceinline__ unsigned gates_full() const { return at(4); }
  __device__ __forceinline__ unsigned gates_empty() const { return at(5); }
  __device__ __forceinline__ unsigned dh_full(int t) const { return at(6 + t); }
  __device__ __forceinline__ unsigned dh_empty(int t) const { return at(6 + dh_slots + t); }
  __device__ __forceinline__ unsigned ring_full(int s) const { return at(6 + 2 * dh_slots + s); }
  __device__ __forceinline__ unsigned ring_empty(int s) const { return at(6 + 2 * dh_slots + ring_slots + s); }
  __device__ __forceinline__ unsigned staged(int job) const { return at(6 + 2 * dh_slots + 2 * ring_slots + job); }

  // By one thread. Every consumer warp empties a slot; where a result leaves through it, the store warp does so in
  // place of the first of them, when the result is read.
  __device__ void init() const {
    arch::barrier_init(gates_full(), 32);
    for (const unsigned full : {q_full(), k_full()}) arch::barrier_init(full, 1);
    for (const unsigned empty : {q_empty(), k_empty(), gates_empty()}) arch::barrier_init(empty, consumer_warps);
    for (int t = 0; t < dh_slots; ++t) {
      arch::barrier_init(dh_full(t), 1);
      arch::barrier_init(dh_empty(t), consumer_warps);
    }
    for (int s = 0; s < ring_slots; ++s) {
      arch::barrier_init(ring_full(s), 1);
      arch::barrier_init(ring_empty(s), consumer_warps);
    }
    for (int job = 0; job < jobs; ++job) arch::barrier_init(staged(job), consumer_warps);
    arch::barriers_ready();
  }
};

template <class Size>
inline constexpr unsigned shared_bytes = Plan<Size>::barriers + 8 * Barriers<Size>::count;
static_assert(shared_bytes<Panels<2, 4>> <= 232448, "what a block may have");

}  // namespace tfla::cuda::sm90::gradients
