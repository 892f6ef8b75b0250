// Stage `keys` on Hopper: the call as its kernel sees it, tiles, shared memory and barriers.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::keys {

using namespace scores;

inline constexpr int threads = 3 * warpgroup;
inline constexpr int warps_of_consumer = warpgroup / 32;
// 504 in all: what 384 threads at 168 own. Consumer 1 has half the scores; with gradients of n the gates take more.
inline constexpr int consumer_registers = 240;
template <bool Norms>
inline constexpr int producer_registers = Norms ? 40 : 24;
template <bool Norms>
inline constexpr int second_consumer_registers = 264 - producer_registers<Norms>;
inline constexpr int trace_warps = warpgroup / 32;  // consumer 1
inline constexpr int columns = 128;                 // of dqk in a tile
inline constexpr int column_panels = columns / panel;
inline constexpr int state_panels = 4;  // of a tile of C or dC, each of which has a lift (float16)

struct Maps {
  CUtensorMap q, k, v, dh;  // boxes of 128 tokens
  CUtensorMap dq, dk;       // of 64
  CUtensorMap C, dC;        // of 128 rows of a state
};
struct PackedMaps : Maps {
  CUtensorMap nothing;
};
template <bool Packed>
using MapsOf = std::conditional_t<Packed, PackedMaps, Maps>;

// The rest of the call.
struct Work {
  Chunks chunks;
  float* row_sums;  // by parts, like the other two
  float* column_sums;
  float* outflow;
  int dhv_panels;  // of 64 columns
  Parts parts;
  int dqk;
  int vectors;                     // numbers in a vector of all tokens and heads: row sums come in parts of so many
  int state_tiles, state_columns;  // of C and dC, in all and side by side (float16)
  double* traces;                  // of consumer 1's warps: gbar <C, dC>; null: nobody asks for them
  const float* decays;             // gbar
  const float *n, *dn;             // [chunks and heads, dqk], where there are gradients of n
};

// 128 columns of dqk of a chunk and head. All parts of it read V and dH.
template <bool Packed>
struct Part : Tile<Packed> {
  int column;  // first one

  __device__ __forceinline__ Part(const Work& work, unsigned tile)
      : Tile<Packed>(work.chunks, work.parts.chunk_of(tile)),
        column(static_cast<int>(work.parts.part_of(tile)) * columns) {}
};

// n and dn of such a part.
struct NormPart {
  const float *n, *dn;
  int columns;

  __device__ __forceinline__ NormPart(const Work& work, unsigned tile) {
    const int first = static_cast<int>(work.parts.part_of(tile)) * keys::columns;
    const std::int64_t at = static_cast<std::int64_t>(work.parts.chunk_of(tile)) * work.dqk + first;
    n = work.n + at;
    dn = work.dn + at;
    columns = min(work.dqk - first, keys::columns);
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
  using Gates = GatePlan<ring + stages * stage_bytes, true>;
  static constexpr unsigned largest = (Gates::end + 15) / 16 * 16;  // float16: the largest numbers of warps
  static constexpr unsigned barriers = largest + 2 * 4 * 2 * warps_of_consumer;
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

  // By one thread. Consumer 0 leaves its dK in Q and consumer 1 in K: there the store warp arrives for it. Rows:
  // nothing is stored.
  template <bool Rows = false>
  __device__ void init() const {
    constexpr int consumer_warps = 2 * warps_of_consumer;
    arch::barrier_init(gates_full(), 32);
    for (const unsigned full : {q_full(), k_full()}) arch::barrier_init(full, 1);
    for (const unsigned empty : {q_empty(), k_empty()})
      arch::barrier_init(empty, (Rows ? consumer_warps : warps_of_consumer + 1) * arch::warp_arrivals);
    arch::barrier_init(gates_empty(), consumer_warps * arch::warp_arrivals);
    arch::barrier_init(ds_empty(), 1);
    for (const unsigned staged : {dk_staged(), dq_staged()})
      arch::barrier_init(staged, consumer_warps * arch::warp_arrivals);
    for (int slot = 0; slot < ring_slots; ++slot) {
      arch::barrier_init(ring_full(slot), 1);
      arch::barrier_init(ring_empty(slot), consumer_warps * arch::warp_arrivals);
    }
    arch::barriers_ready();
  }
};

// A consumer's end of the ring. W: its number; it has keys and queries from 64 W on, and no query before its keys sees
// them.
template <int W, bool Packed>
struct RingReader {
  static constexpr int first_query = W * half, queries = chunk - first_query;
  static constexpr unsigned own = W * half_bytes;                  // of this consumer's rows in a slot
  static constexpr unsigned query_rows = first_query * row_bytes;  // of the queries that see its keys

  const Work& work;
  unsigned memory;
  unsigned panels = 0;  // before the one that is next
  unsigned parity = 0;  // of the tiles before this one

  __device__ __forceinline__ RingReader(const Work& w, unsigned m) : work(w), memory(m) {}

  __device__ __forceinline__ Barriers barriers() const { return {memory + Plan::barriers}; }
  __device__ __forceinline__ int first_slot() const { return static_cast<int>(panels % 2) * panel_slots; }
  __device__ __forceinline__ unsigned take(Slot slot) const {
    arch::wait(barriers().ring_full(first_slot() + slot), panels / 2 & 1);
    return memory + Plan::ring + (first_slot() + slot) * slot_bytes;
  }
  __device__ __forceinline__ void give_back(Slot slot) const {
    if (arch::arrives(threadIdx.x % 32 == 0)) arch::arrive(barriers().ring_empty(first_slot() + slot));
  }

  // float16: C and dC come in tiles of state_panels panels whose lifts differ. What a sum over one of them is
  // multiplied by to be in terms of the next one; after the last one, to be what it is. Of the lowers of C, or of dC.
  // Tiles of packed sequences are not numbered one after the other: the gate vectors come with their number.
  __device__ __forceinline__ auto lowering(unsigned tile, int from, int to) const {
    if constexpr (Packed) {
      arch::wait(barriers().gates_full(), parity);
      tile = static_cast<unsigned>(arch::read_int2(memory + Plan::Gates::index).x);
    }
    const unsigned first =
        work.parts.chunk_of(tile) * work.state_tiles + work.parts.part_of(tile) * work.state_columns + from;
    const bool last = to * state_panels >= work.dhv_panels;
    return [first, last](const float* lowers) {
      const float x = lowers[first] * (last ? 1.0F : inverse_power(lowers[first + 1]));
      return float2{x, x};
    };
  }
};

// Named barriers: among the warps of consumer 0, and from consumer 0 to consumer 1.
inline constexpr int own_barrier = 1, ds_is_written = 2, ds_is_read = 3;

inline constexpr unsigned shared_bytes = Plan::barriers + 8 * Barriers::count;
static_assert(shared_bytes <= cta_shared_bytes, "what a CTA may have");

}  // namespace tfla::cuda::sm90::keys
