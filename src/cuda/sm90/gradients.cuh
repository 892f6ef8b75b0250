// The kernel of stage `gradients` on Hopper: dQ, dK, dV of a chunk of 128 tokens and one head, one such tile after the
// other on every multiprocessor. See docs/hopper.md.
//
// V, C and dC stream through a ring in panels of 64 columns, only Q, K and dH stay for the whole tile. Two consumer
// warpgroups own 64 keys (for dK, dV) and 64 queries (for dQ) each. Scores are computed with keys in rows, so that P
// and dS are register operands for dV and dK; dS goes through shared memory once, for dQ.
#pragma once

#include <cuda.h>

#include <bit>
#include <cstdint>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/copy.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/portable/device.cuh"
#include "cuda/sm90/divider.h"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/tensor_map.h"

namespace tfla::cuda::sm90::gradients {

using arch::Major;
using Type = __nv_bfloat16;

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
  float scale;  // above zero: its logarithm is taken
  int heads, chunks_per_row, tokens, all_tokens;
  Divider by_heads, by_chunks_per_row;
  unsigned tiles;
};

// A chunk of a head. Heads of a chunk are neighbours: they lie side by side in memory.
struct Tile {
  int head;
  int state;  // number of the (chunk, head)
  int batch;
  int token;   // first one, in its row of the batch
  int length;  // tokens; those beyond are zero in every operand, and not stored
  int at;      // where vectors begin

  __device__ __forceinline__ Tile(const Work& work, unsigned index) : state(static_cast<int>(index)) {
    const auto number = static_cast<int>(work.by_heads.quotient(index));
    head = state - number * work.heads;
    batch = static_cast<int>(work.by_chunks_per_row.quotient(number));
    token = (number - batch * work.chunks_per_row) * chunk;
    length = min(chunk, work.tokens - token);
    at = head * work.all_tokens + batch * work.tokens + token;
  }
};

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

// ---- producers

// One thread: the ring.
template <class Size>
__device__ __forceinline__ void load_ring(const Maps& maps, const Work& work, unsigned memory) {
  using P = Plan<Size>;
  constexpr unsigned state_bytes = Size::dqk * half_bytes;
  const Barriers<Size> barriers{memory + P::barriers};
  Ring<P::ring_slots> ring;
  const auto next_free = [&] {
    arch::wait(barriers.ring_empty(ring.slot), ring.phase ^ 1);
    return barriers.ring_full(ring.slot);
  };
  const auto skip = [&] {
    arch::arrive(next_free());
    ring.advance();
  };
  const auto load_state = [&](const CUtensorMap& map, int state, int t) {
    const unsigned full = next_free();
    arch::arrive_expecting(full, state_bytes);
    arch::load_box(memory + P::ring + ring.slot * slot_bytes, &map, full, t * panel, 0, state);
    ring.advance();
  };
  for (unsigned index = blockIdx.x; index < work.tiles; index += gridDim.x) {
    const Tile tile(work, index);
#pragma unroll 1
    for (int t = 0; t < Size::dhv; ++t) {
      load_state(maps.dC, tile.state, t);
      const unsigned full = next_free();
      arch::arrive_expecting(full, slot_bytes);
      arch::load_box(memory + P::ring + ring.slot * slot_bytes, &maps.v, full, t * panel, tile.token, tile.head,
                     tile.batch);
      ring.advance();
    }
#pragma unroll 1
    for (int t = 0; t < Size::dhv; ++t) load_state(maps.C, tile.state, t);
    skip();
    skip();
  }
  // Consumers begin a tile after their last one, unconditionally: see begin_dk.
  skip();
  skip();
}

// One thread: what stays for a tile. Q and K are needed first; the slots through which dK leaves come last.
template <class Size>
__device__ __forceinline__ void load_resident(const Maps& maps, const Work& work, unsigned memory) {
  using P = Plan<Size>;
  const Barriers<Size> barriers{memory + P::barriers};
  unsigned parity = 1;
  for (unsigned index = blockIdx.x; index < work.tiles; index += gridDim.x, parity ^= 1) {
    const Tile tile(work, index);
    const auto load = [&](const CUtensorMap& map, unsigned to, unsigned full, int first, int panels) {
      arch::arrive_expecting(full, panels * slot_bytes);
#pragma unroll 1
      for (int p = 0; p < panels; ++p)
        arch::load_box(to + p * slot_bytes, &map, full, (first + p) * panel, tile.token, tile.head, tile.batch);
    };
    const auto load_dh = [&](int t) {
      arch::wait(barriers.dh_empty(t), parity);
      load(maps.dh, memory + P::dh + t * slot_bytes, barriers.dh_full(t), t, 1);
    };
#pragma unroll 1
    for (int t = 0; t < P::dk_slot; ++t) load_dh(t);
    arch::wait(barriers.q_empty(), parity);
    load(maps.q, memory + P::q, barriers.q_full(), 0, Size::dqk);
    arch::wait(barriers.k_empty(), parity);
    load(maps.k, memory + P::k, barriers.k_full(), 0, Size::dqk);
#pragma unroll 1
    for (int t = P::dk_slot; t < Size::dhv; ++t) load_dh(t);
  }
}

// One warp: the vectors of a tile. u, which takes arithmetic, waits in registers for the room of the tile before.
template <class Size>
__device__ __forceinline__ void load_gates(const Work& work, unsigned memory) {
  using P = Plan<Size>;
  const Barriers<Size> barriers{memory + P::barriers};
  const int lane = threadIdx.x % 32;
  unsigned parity = 1;
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < work.tiles; index += gridDim.x, parity ^= 1) {
    const Tile tile(work, index);
    float2 u[chunk / 32];
#pragma unroll
    for (int x = 0; x < chunk / 32; ++x) {
      const int t = lane + 32 * x;
      const bool valid = t < tile.length;
      u[x] = valid ? work.u[tile.at + t] : float2{};
      u[x].y += __log2f(work.scale * (valid ? work.inverse[tile.at + t] : 0));  // D is zero beyond the tokens
      arch::pin(u[x]);
    }
    arch::wait(barriers.gates_empty(), parity);
#pragma unroll
    for (int x = 0; x < chunk / 32; ++x) arch::write_float2(memory + P::u + 8 * (lane + 32 * x), u[x]);
#pragma unroll 1
    for (int t = lane; t < chunk; t += 32)
      arch::copy_small<8>(memory + P::c + 8 * t, work.c + tile.at + min(t, tile.length - 1), t < tile.length);
    if (lane == 0) {
      float2 inflow, outflow;
      as_exponent(work.m_start[index], inflow);
      arch::write_float2(memory + P::inflow, inflow);
      as_exponent(work.b[tile.at + tile.length - 1] - work.m_end[index], outflow);
      arch::write_float2(memory + P::outflow, outflow);
      arch::write_int2(memory + P::vectors, {tile.at, tile.length + (index + gridDim.x < work.tiles ? 0 : last_tile)});
    }
    arch::commit_copies();
    arch::wait_copies<0>();
    arch::arrive(barriers.gates_full());
  }
}

// One thread: sends what the consumers staged, and empties the slots.
template <class Size>
__device__ __forceinline__ void store_results(const Maps& maps, const Work& work, unsigned memory) {
  using P = Plan<Size>;
  using B = Barriers<Size>;
  const B barriers{memory + P::barriers};
  Ring<P::ring_slots> ring;
  const auto slot = [&] { return memory + P::ring + ring.slot * slot_bytes; };
  const auto read = [] {
    arch::commit_stores();
    arch::wait_stores_read<0>();
  };
  unsigned parity = 0;
  for (unsigned index = blockIdx.x; index < work.tiles; index += gridDim.x, parity ^= 1) {
    const Tile tile(work, index);
#pragma unroll 1
    for (int t = 0; t < Size::dhv; ++t) {
      ring.advance();  // dC_t
      arch::wait(barriers.staged(t), parity);
      arch::store_box(slot(), &maps.dv, t * panel, tile.token, tile.head, tile.batch);
      read();
      arch::arrive(barriers.ring_empty(ring.slot));
      ring.advance();
    }
    ring.advance(Size::dhv);  // C
    arch::wait(barriers.staged(B::dk_job), parity);
#pragma unroll 1
    for (int p = 0; p < Size::dqk; ++p)
      arch::store_box(memory + P::dh + (P::dk_slot + p) * slot_bytes, &maps.dk, p * panel, tile.token, tile.head,
                      tile.batch);
    read();
#pragma unroll 1
    for (int p = 0; p < Size::dqk; ++p) arch::arrive(barriers.dh_empty(P::dk_slot + p));
    arch::wait(barriers.staged(B::dq_job), parity);
#pragma unroll 1
    for (int w = 0; w < 2; ++w) {
#pragma unroll 1
      for (int p = 0; p < Size::dqk; ++p)
        arch::store_box(slot() + p * half_bytes, &maps.dq, p * panel, tile.token + w * half, tile.head, tile.batch);
      read();
      arch::arrive(barriers.ring_empty(ring.slot));
      ring.advance();
    }
  }
  arch::wait_stores<0>();
}

// ---- consumers

// sum (+)= A B^T over a panel of 64: rows of both lie along the depth. There the distance of panels in a descriptor
// means nothing; two values of it keep the compiler from saving descriptors of B to use them for A much later, which
// spills.
template <int R>
__device__ __forceinline__ void multiply_panel(float (&sum)[R], unsigned a, unsigned a_offset, unsigned b,
                                               unsigned b_offset, bool add) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    arch::multiply<Type, Major::depth, Major::depth>(sum, arch::tile_at(a, a_offset + 32 * step, 0),
                                                     arch::tile_at(b, b_offset + 32 * step, 16), add || step > 0);
}

// Rows g and g + 8 of this thread times a number each.
template <int R>
__device__ __forceinline__ void scale_rows(float (&sum)[R], float2 by) {
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    sum[4 * n] *= by.x;
    sum[4 * n + 1] *= by.x;
    sum[4 * n + 2] *= by.y;
    sum[4 * n + 3] *= by.y;
  }
}

// This thread's part of rows of Q or K, as it holds a sum of as many columns. row: see Lane.
template <int R>
__device__ __forceinline__ void load_rows(std::uint32_t (&rows)[R / 8][4], unsigned row) {
#pragma unroll
  for (int n = 0; n < R / 8; ++n) arch::load_tiles(rows[n], (row + n / 4 * slot_bytes) ^ (n % 4 << 5));
}

// Dot products of rows g and g + 8, in two chains each: the latency of one would show.
template <int R>
__device__ __forceinline__ float2 row_dots(const float (&sum)[R], const std::uint32_t (&rows)[R / 8][4]) {
  float parts[4]{};
#pragma unroll
  for (int n = 0; n < R / 8; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float2 pair = arch::unpack(rows[n][x], Type{});
      const int e = 8 * n + 2 * x;
      parts[x] = fmaf(pair.x, sum[e], fmaf(pair.y, sum[e + 1], parts[x]));
    }
  }
  float2 dots{parts[0] + parts[2], parts[1] + parts[3]};
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    dots.x += __shfl_xor_sync(0xFFFFFFFFU, dots.x, offset);
    dots.y += __shfl_xor_sync(0xFFFFFFFFU, dots.y, offset);
  }
  return dots;
}
template <int R>
__device__ __forceinline__ float2 row_dots(const float (&sum)[R], unsigned row) {
  std::uint32_t rows[R / 8][4];
  load_rows<R>(rows, row);
  return row_dots(sum, rows);
}

// Where a thread of consumer W works.
template <int W>
struct Lane {
  int row;               // its first key, and query; the other is 8 below
  int pair;              // its first column in every group of 8
  bool leads;            // the warp
  bool leads_and_stays;  // the same, but where the store warp stands in for the first of consumer 0
  // Row that load_tiles and store_tiles take, in a half panel and in a panel, as swizzled: column group n lies at
  // address ^ (n << 5).
  unsigned half_row, panel_row;

  __device__ __forceinline__ Lane() {
    const unsigned thread = threadIdx.x % warpgroup;
    const unsigned lane = thread % 32, warp = thread / 32;
    row = static_cast<int>(W * half + warp * 16 + lane / 4);
    pair = static_cast<int>(lane % 4 * 2);
    leads = lane == 0;
    leads_and_stays = leads && (W != 0 || warp != 0);
    half_row = (warp * 16 + lane % 16) * row_bytes + ((lane / 16 ^ lane % 8) << 4);
    panel_row = W * half_bytes + half_row;
  }
};

// Writes panels of 64 columns as bfloat16 for the store warp.
template <int R>
__device__ __forceinline__ void stage(const float (&sum)[R], unsigned row, unsigned panel_bytes, unsigned staged,
                                      bool leads) {
#pragma unroll
  for (int n = 0; n < R / 8; ++n) {
    const auto pack = [&](int e) { return arch::pack({sum[8 * n + e], sum[8 * n + e + 1]}, Type{}); };
    arch::store_tiles((row + n / 4 * panel_bytes) ^ (n % 4 << 5), pack(0), pack(2), pack(4), pack(6));
  }
  arch::writes_before_copies();
  __syncwarp();
  if (leads) arch::arrive(staged);
}

// P = S . D, or dS = dP . D, with keys in rows and queries in columns; D holds scale / den. Above the diagonal D may be
// infinite: those are set to zero, not multiplied. ahead: tokens from this thread's first query to its first key.
template <int R>
__device__ __forceinline__ void gate(const float (&scores)[R], std::uint32_t (&gated)[R / 8][4], unsigned u, float2 c0,
                                     float2 c1, int ahead) {
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    const float4 pair = arch::read_float4(u + n * 64);
    const float2 u0{pair.x, pair.y}, u1{pair.z, pair.w};
    float x0 = scores[4 * n] * exp_sum(u0, c0), x1 = scores[4 * n + 1] * exp_sum(u1, c0);
    float x2 = scores[4 * n + 2] * exp_sum(u0, c1), x3 = scores[4 * n + 3] * exp_sum(u1, c1);
    if (n < half / 8) {  // the first 64 queries are the consumer's own
      x0 = ahead <= 8 * n ? x0 : 0;
      x1 = ahead <= 8 * n + 1 ? x1 : 0;
      x2 = ahead <= 8 * n - 8 ? x2 : 0;
      x3 = ahead <= 8 * n - 7 ? x3 : 0;
    }
    gated[n / 2][n % 2 * 2] = arch::pack({x0, x1}, Type{});
    gated[n / 2][n % 2 * 2 + 1] = arch::pack({x2, x3}, Type{});
  }
}

// Two rows of a vector in global memory. Nothing of the next head is written.
__device__ __forceinline__ void write_rows(float* to, int2 vectors, int row, float2 x) {
  if (threadIdx.x % 4 != 0) return;
  const int length = vectors.y % last_tile;
  if (row < length) to[vectors.x + row] = x.x;
  if (row + 8 < length) to[vectors.x + row + 8] = x.y;
}

// Consumer W has keys and queries from 64 W on. No query before its keys sees them: consumer 1 has half the scores.
template <class Size, int W>
struct Consumer {
  using P = Plan<Size>;
  using B = Barriers<Size>;
  static constexpr int first_query = W * half, queries = chunk - first_query;
  static constexpr unsigned own = W * half_bytes;                  // of this consumer's rows in a slot
  static constexpr unsigned query_rows = first_query * row_bytes;  // of the queries that see its keys
  static constexpr unsigned step_rows = 16 * row_bytes;            // of a step of a product along rows

  const Work& work;
  unsigned memory;
  unsigned first_item = 0;  // items of the tiles before this one

  float dK[Size::dqk * 32];
  // Sums are inputs of their first product too, though it ignores them: what is to die with a tile must not be a
  // member.
  using Scores = float[queries / 2];             // S, then dP: as two arrays they would spill
  using Gated = std::uint32_t[queries / 16][4];  // P, then dS

  __device__ __forceinline__ Consumer(const Work& w, unsigned m) : work(w), memory(m) {}

  // Of the number of the tile. That number times an odd one is as odd.
  __device__ __forceinline__ unsigned parity() const { return first_item >> P::even_factor & 1; }
  __device__ __forceinline__ B barriers() const { return {memory + P::barriers}; }
  __device__ __forceinline__ unsigned q() const { return memory + P::q; }
  __device__ __forceinline__ unsigned k() const { return memory + P::k; }
  __device__ __forceinline__ unsigned dh() const { return memory + P::dh; }

  // Items of the ring. Their slots follow from the number of the tile: a ring would be two more numbers to keep, and
  // spill.
  __device__ static constexpr int item_of_dC(int t) { return 2 * t; }
  __device__ static constexpr int item_of_v(int t) { return 2 * t + 1; }
  __device__ static constexpr int item_of_C(int t) { return 2 * Size::dhv + t; }
  __device__ static constexpr int item_of_ds(int half_of_queries) { return 3 * Size::dhv + half_of_queries; }
  __device__ __forceinline__ unsigned number(int item) const { return first_item + item; }
  __device__ __forceinline__ unsigned slot(int item) const {
    return memory + P::ring + number(item) % P::ring_slots * slot_bytes;
  }
  __device__ __forceinline__ unsigned ring_empty(int item) const {
    return barriers().ring_empty(number(item) % P::ring_slots);
  }
  __device__ __forceinline__ unsigned take(int item) const {
    arch::wait(barriers().ring_full(number(item) % P::ring_slots), number(item) / P::ring_slots & 1);
    return slot(item);
  }

  // dK = V_0 dC_0^T. For the next tile it begins before the results of this one are written: the tensor cores have work
  // meanwhile. Under no condition, since ptxas serializes sums that are under way over a branch.
  __device__ __forceinline__ void begin_dk(int first_item) {
    const unsigned dC = take(first_item), v = take(first_item + 1);
    arch::products_begin();
    multiply_panel(dK, v, own, dC, 0, false);
    arch::products_commit();
  }

  // dV = K dC_t.
  __device__ __forceinline__ void begin_dv(float (&dV)[32], int t) {
    const unsigned dC = slot(item_of_dC(t));
#pragma unroll
    for (int step = 0; step < Size::dqk * 4; ++step)
      arch::multiply<Type, Major::depth, Major::across>(dV,
                                                        arch::tile_at(k(), step / 4 * slot_bytes + own + step % 4 * 32),
                                                        arch::tile_at(dC, step * step_rows), step > 0);
    arch::products_commit();
  }

  // exp_sum of a vector at this thread's rows and a number of the tile: abar, or qbar scale / den.
  __device__ __forceinline__ float2 row_weights(unsigned vector, unsigned number) const {
    const unsigned row = memory + vector + Lane<W>().row * 8;
    const float2 shift = arch::read_float2(memory + number);
    return {exp_sum(arch::read_float2(row), shift), exp_sum(arch::read_float2(row + 64), shift)};
  }

  __device__ __forceinline__ void gate_scores(const Scores& scores, Gated& gated) {
    const Lane<W> my;
    const float2 c0 = arch::read_float2(memory + P::c + my.row * 8);
    const float2 c1 = arch::read_float2(memory + P::c + (my.row + 8) * 8);
    const int query = first_query + my.pair;
    gate(scores, gated, memory + P::u + query * 8, c0, c1, my.row - query);
  }

  // S^T = K Q^T and dV_0 = K dC_0; P while the second is under way; dP = V_0 dH_0^T.
  __device__ __forceinline__ void begin_panels(Scores& scores, Gated& gated, float (&dV)[32]) {
    arch::wait(barriers().k_full(), parity());
    arch::wait(barriers().q_full(), parity());
    arch::products_begin();
#pragma unroll
    for (int p = 0; p < Size::dqk; ++p)
      multiply_panel(scores, k(), p * slot_bytes + own, q(), p * slot_bytes + query_rows, p > 0);
    arch::products_commit();
    begin_dv(dV, 0);
    arch::wait(barriers().gates_full(), parity());
    arch::products_wait<1>();
    arch::pin(scores);
    arch::pin(dK);
    arch::wait(barriers().dh_full(0), parity());
    gate_scores(scores, gated);
    arch::products_begin();
    multiply_panel(scores, slot(item_of_v(0)), own, dh(), query_rows, false);
    arch::products_commit();
    arch::products_wait<1>();
    arch::pin(dV);
  }

  // dV = abar K dC + P^T dH panel by panel, and with it dP and dK.
  __device__ __forceinline__ void panels(Scores& scores, Gated& gated) {
    float dV[32];
    begin_panels(scores, gated, dV);
    const Lane<W> my;
    const float2 abar = row_weights(P::c, P::outflow);
#pragma unroll
    for (int t = 0; t < Size::dhv; ++t) {
      if (t > 0) {
        arch::products_begin();
        begin_dv(dV, t);
        arch::products_wait<0>();
        arch::pin(dV);
        arch::pin(scores);
        arch::pin(dK);
      }
      if (my.leads) arch::arrive(ring_empty(item_of_dC(t)));
      scale_rows(dV, abar);
      arch::pin(dV);
      arch::products_begin();
#pragma unroll
      for (int step = 0; step < queries / 16; ++step)
        arch::multiply<Type, Major::across>(dV, gated[step],
                                            arch::tile_at(dh(), t * slot_bytes + query_rows + step * step_rows), true);
      arch::products_commit();
      if (t + 1 < Size::dhv) {
        arch::wait(barriers().dh_full(t + 1), parity());
        const unsigned dC = take(item_of_dC(t + 1)), v = take(item_of_v(t + 1));
        arch::products_begin();
        multiply_panel(scores, v, own, dh(), (t + 1) * slot_bytes + query_rows, true);
        multiply_panel(dK, v, own, dC, 0, true);
        arch::products_commit();
        arch::products_wait<1>();
      } else {
        arch::products_wait<0>();
        arch::pin(scores);
        arch::pin(dK);
      }
      arch::pin(dV);
      if (my.leads_and_stays) arch::arrive(ring_empty(item_of_v(t)));
      stage(dV, slot(item_of_v(t)) + my.panel_row, 0, barriers().staged(t), my.leads);
    }
  }

  // dS as [key][query], for dQ.
  __device__ __forceinline__ void share_gated(const Gated& gated) {
    const Lane<W> my;
    const unsigned ds[2] = {take(item_of_ds(0)), take(item_of_ds(1))};
#pragma unroll
    for (int n = 0; n < queries / 16; ++n) {
      const unsigned row = ds[W == 0 && n < 4 ? 0 : 1] + my.panel_row;
      arch::store_tiles(row ^ (n % 4 << 5), gated[n][0], gated[n][1], gated[n][2], gated[n][3]);
    }
    arch::writes_before_copies();
  }

  // dQ = qbar dH C^T + dS K and dK = abar V dC^T + dS^T Q, with all that is left of the tile. Whether it was the last.
  __device__ __forceinline__ bool finish(Scores& scores, Gated& gated) {
    const Lane<W> my;
    float dQ[Size::dqk * 32];
#pragma unroll
    for (int t = 0; t < Size::dhv; ++t) {
      const unsigned C = take(item_of_C(t));
      arch::products_begin();
      multiply_panel(dQ, dh(), t * slot_bytes + own, C, 0, t > 0);
      arch::products_commit();
    }
    // Meanwhile the first term of dK, which is what flows out of the chunk, and dS.
    scale_rows(dK, row_weights(P::c, P::outflow));
    write_rows(work.outflow, arch::read_int2(memory + P::vectors), my.row, row_dots(dK, k() + my.panel_row));
    arch::pin(scores);
    gate_scores(scores, gated);
    arch::products_wait<0>();
    arch::pin(dQ);
    scale_rows(dQ, row_weights(P::u, P::inflow));
    const int2 vectors = arch::read_int2(memory + P::vectors);
    __syncwarp();
    if (my.leads) {
      arch::arrive(barriers().gates_empty());
#pragma unroll
      for (int t = 0; t < Size::dhv; ++t) {
        arch::arrive(ring_empty(item_of_C(t)));
      }
    }
#pragma unroll
    for (int t = 0; t < Size::dhv; ++t)
      if (t < P::dk_slot ? my.leads : my.leads_and_stays) arch::arrive(barriers().dh_empty(t));
    share_gated(gated);
    arch::pin(dK);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < queries / 16; ++step)
      arch::multiply<Type, Major::across>(dK, gated[step],
                                          arch::tile_at(q(), query_rows + step * step_rows, slot_bytes), true);
    arch::products_commit();
    arch::named_wait(3, 2 * warpgroup);  // all of dS is there, and nobody reads dH
    arch::pin(dQ);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < (W + 1) * half / 16; ++step)
      arch::multiply<Type, Major::across, Major::across>(dQ, arch::tile_at(slot(item_of_ds(W)), step * step_rows),
                                                         arch::tile_at(k(), step * step_rows, slot_bytes), true);
    arch::products_commit();
    arch::products_wait<1>();
    arch::pin(dK);
    const float2 kdk = row_dots(dK, k() + my.panel_row);
    stage(dK, dh() + P::dk_slot * slot_bytes + my.panel_row, slot_bytes, barriers().staged(B::dk_job), my.leads);
    // Q and K of the next tile are what it waits for: they are given back before the sums with them are taken.
    std::uint32_t q_rows[Size::dqk * 4][4];
    load_rows<Size::dqk * 32>(q_rows, q() + my.panel_row);
    __syncwarp();
    if (my.leads) arch::arrive(barriers().q_empty());
    arch::products_wait<0>();
    arch::pin(dQ);
    if (my.leads) arch::arrive(barriers().k_empty());
    if (my.leads_and_stays) {
      arch::arrive(ring_empty(item_of_ds(0)));
      arch::arrive(ring_empty(item_of_ds(1)));
    }
    const float2 qdq = row_dots(dQ, q_rows);
    begin_dk(P::ring_items);
    arch::named_wait(1 + W, warpgroup);  // dS is read
    stage(dQ, slot(item_of_ds(W)) + my.half_row, half_bytes, barriers().staged(B::dq_job), my.leads);
    write_rows(work.row_sums, vectors, my.row, qdq);
    write_rows(work.column_sums, vectors, my.row, kdk);
    return vectors.y >= last_tile;
  }

  __device__ __forceinline__ void run() {
    begin_dk(0);
#pragma unroll 1
    for (;; first_item += P::ring_items) {
      Scores scores;
      Gated gated;
      panels(scores, gated);
      if (finish(scores, gated)) break;
    }
    arch::products_wait<0>();
    arch::pin(dK);
  }
};

template <class Size>
__global__ void __launch_bounds__(threads, 1)
    gradients_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  if (threadIdx.x == 0) Barriers<Size>{memory + Plan<Size>::barriers}.init();
  __syncthreads();
  switch (threadIdx.x / warpgroup) {
    case 0:
      arch::fewer_registers<producer_registers>();
      if (threadIdx.x == 0) load_ring<Size>(maps, work, memory);
      if (threadIdx.x == 32) load_resident<Size>(maps, work, memory);
      if (threadIdx.x == 64) store_results<Size>(maps, work, memory);
      if (threadIdx.x >= 96) load_gates<Size>(work, memory);
      break;
    case 1:
      arch::more_registers<consumer_registers>();
      Consumer<Size, 0>(work, memory).run();
      break;
    default:
      arch::more_registers<consumer_registers>();
      Consumer<Size, 1>(work, memory).run();
      break;
  }
#endif
}

}  // namespace tfla::cuda::sm90::gradients
