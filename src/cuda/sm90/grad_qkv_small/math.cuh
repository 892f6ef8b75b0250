// grad_qkv_small: the two math warpgroups.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qkv_small/shared.cuh"

namespace tfla::cuda::sm90::grad_qkv_small {

// Math warpgroup W owns keys and queries of token block W (see scores.cuh).
template <class C, int W>
struct Math {
  using T = typename C::T;
  using B = Barriers;
  using Gates = Shared::Gates;
  using Sum = float[C::columns / 2];
  using Scores = float[token_block / 2];             // of 64 queries: S or dP
  using Gated = std::uint32_t[token_block / 16][4];  // P or dS
  static constexpr int query_blocks = 2 - W;         // that see its keys
  static constexpr unsigned own = W * panel_bytes;   // where its rows begin in a chunk panel
  static constexpr int own_barrier = W == 0 ? math_0_barrier : math_1_barrier;

  const Work& work;
  unsigned memory;
  unsigned parity = 0;  // of the tile

  __device__ __forceinline__ Math(const Work& w, unsigned m) : work(w), memory(m) {}

  __device__ __forceinline__ B barriers() const { return {memory}; }
  __device__ __forceinline__ void await(B::Tensor tensor) const { arch::wait(barriers().full(tensor), parity); }
  __device__ __forceinline__ TileInfo info() const { return TileInfo::read(memory + Gates::info); }

  // Sums that begin with zeros. ptxas keeps sums that a product overwrites alive from one tile to the next, and spills
  // them.
  template <int R>
  __device__ __forceinline__ static void clear(float (&sum)[R]) {
#pragma unroll
    for (float& x : sum) x = 0;
    arch::pin(sum);
  }

  // sum (+)= A B^T over all columns: 64 rows of A, as many of B as sum has columns.
  template <int R>
  __device__ __forceinline__ void multiply_rows(float (&sum)[R], unsigned a, unsigned b) const {
#pragma unroll
    for (int step = 0; step < C::columns / 16; ++step)
      arch::multiply<T, Major::depth, Major::depth>(sum, arch::tile_at(memory + a, 32 * step),
                                                    arch::tile_at(memory + b, 32 * step), step > 0);
    arch::products_commit();
  }

  // Scores of the queries of token block `Block`.
  template <int Block>
  __device__ __forceinline__ void gate_queries(const Scores& scores, Gated& gated) const {
    const ChunkLane<W> my;
    const int query = Block * token_block + my.pair;
    gate_block<T, Gates, W>(scores, gated, memory, query, Block == W ? my.row - query : -chunk_tokens, 1);
  }

  // dS as [key][query], for dQ.
  __device__ __forceinline__ void share(const Gated& gated, unsigned to) const {
    const unsigned row = memory + to + ChunkLane<W>().panel_row;
#pragma unroll
    for (int n = 0; n < token_block / 16; ++n)
      arch::store_tiles(row ^ (n << 5), gated[n][0], gated[n][1], gated[n][2], gated[n][3]);
    arch::writes_before_copies();
  }

  __device__ __forceinline__ void stage_sum(const Sum& sum, unsigned to, B::Result result) const {
    const ChunkLane<W> my;
    stage<T>(sum, memory + to + my.panel_row, 0, barriers().staged(result), my.leads, {1, 1});
  }

  // Dot products of the rows of a sum with those of Q or K go to a vector in global memory.
  __device__ __forceinline__ void write_dots(float* to, int row, const Sum& sum, unsigned rows) const {
    const TileInfo tile = info();
    tile.write_rows(to, row, row_dots<T>(sum, memory + rows + ChunkLane<W>().chunk_panel_row));
  }

  // P or dS of all queries that see the warpgroup's keys, 64 at a time. begin(block) begins the product of their
  // scores, ready(block) is called when they have been gated; block counts from token block W on.
  template <class Begin, class Ready>
  __device__ __forceinline__ void gate_all(Scores& scores, Gated (&gated)[query_blocks], const Begin& begin,
                                           const Ready& ready) const {
    arch::products_wait<0>();
    arch::pin(scores);
    gate_queries<W>(scores, gated[0]);
    if constexpr (query_blocks == 1) return ready(0);
    arch::pin(scores);
    begin(1);
    ready(0);
    arch::products_wait<0>();
    arch::pin(scores);
    gate_queries<1>(scores, gated[query_blocks - 1]);
    ready(1);
  }

  // sum += gated B: rows of B are queries.
  __device__ __forceinline__ void add_all(Sum& sum, const Gated (&gated)[query_blocks], unsigned b) const {
    arch::pin(sum);
    arch::products_begin();
#pragma unroll
    for (int block = 0; block < query_blocks; ++block)
#pragma unroll
      for (int step = 0; step < token_block / 16; ++step)
        arch::multiply<T, Major::across>(sum, gated[block][step],
                                         arch::tile_at(memory + b, own + block * panel_bytes + step * step_rows_bytes),
                                         true);
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(sum);
  }

  // dK = abar V dC^T + dS^T Q, and dS.
  __device__ __forceinline__ void make_dk() const {
    const ChunkLane<W> my;
    Scores dP;
    Gated dS[query_blocks];
    const auto begin = [&](int block) {
      arch::products_begin();
      multiply_rows(dP, Shared::v + own, Shared::dh + own + block * panel_bytes);
    };
    await(B::v);
    await(B::dh);
    clear(dP);
    begin(0);
    await(B::gates);
    arch::wait(barriers().stored(B::dq), parity ^ 1);  // dQ of the tile before has left the place of dS
    gate_all(dP, dS, begin, [&](int block) { share(dS[block], block == 0 ? Shared::ds + own : Shared::ds_across); });
    if constexpr (W == 0) arch::named_arrive(ds_written, 2 * warpgroup_threads);
    Sum dK;
    await(B::dC);
    clear(dK);
    arch::products_begin();
    multiply_rows(dK, Shared::v + own, Shared::dC);
    const float2 weights = abar<Gates, W>(memory);
    await(B::k);
    await(B::q);
    arch::products_wait<0>();
    arch::pin(dK);
    scale_rows(dK, weights);
    write_dots(work.outflow, my.row, dK, Shared::k);
    add_all(dK, dS, Shared::q);
    write_dots(work.column_sums, my.row, dK, Shared::k);
    stage_sum(dK, Shared::v + own, B::dk);
  }

  // dQ = qbar dH C^T + dS K.
  __device__ __forceinline__ void make_dq() const {
    const ChunkLane<W> my;
    Sum dQ;
    await(B::C);
    clear(dQ);
    arch::products_begin();
    multiply_rows(dQ, Shared::dh + own, Shared::C);
    const float2 weights = qbar<Gates, W>(memory);
    // Warpgroup 0 reads the dS that it wrote, warpgroup 1 what both wrote.
    W == 0 ? arch::named_wait(own_barrier, warpgroup_threads) : arch::named_wait(ds_written, 2 * warpgroup_threads);
    arch::products_wait<0>();
    arch::pin(dQ);
    scale_rows(dQ, weights);
    arch::pin(dQ);
    arch::products_begin();
    const auto add = [&](unsigned dS, unsigned keys) {
#pragma unroll
      for (int step = 0; step < token_block / 16; ++step)
        arch::multiply<T, Major::across, Major::across>(dQ, arch::tile_at(memory + dS, step * step_rows_bytes),
                                                        arch::tile_at(memory + keys, step * step_rows_bytes), true);
    };
    if constexpr (W == 1) add(Shared::ds_across, Shared::k);
    add(Shared::ds + own, Shared::k + own);
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(dQ);
    write_dots(work.row_sums, my.row, dQ, Shared::q);
    arch::named_wait(own_barrier, warpgroup_threads);  // all warps have read dS
    stage_sum(dQ, Shared::ds + own, B::dq);
  }

  // dV = abar K dC + P^T dH. It leaves through rows that nobody else reads: of Q, or of K. Returns whether the tile is
  // the last one.
  __device__ __forceinline__ bool make_dv() const {
    Scores S;
    Gated P[query_blocks];
    const auto begin = [&](int block) {
      arch::products_begin();
      multiply_rows(S, Shared::k + own, Shared::q + own + block * panel_bytes);
    };
    clear(S);
    begin(0);
    gate_all(S, P, begin, [](int) {});
    Sum dV;
    clear(dV);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < C::columns / 16; ++step)
      arch::multiply<T, Major::depth, Major::across>(dV, arch::tile_at(memory + Shared::k, own + 32 * step),
                                                     arch::tile_at(memory + Shared::dC, step * step_rows_bytes),
                                                     step > 0);
    arch::products_commit();
    const float2 weights = abar<Gates, W>(memory);
    const bool is_last = info().is_last();
    arch::products_wait<0>();
    arch::pin(dV);
    scale_rows(dV, weights);
    add_all(dV, P, Shared::dh);
    if constexpr (W == 0) arch::named_wait(own_barrier, warpgroup_threads);  // all its warps have read Q
    stage_sum(dV, W == 0 ? Shared::q : Shared::k + own, B::dv);
    return is_last;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; parity ^= 1) {
      make_dk();
      make_dq();
      if (make_dv()) break;
    }
  }
};

}  // namespace tfla::cuda::sm90::grad_qkv_small
