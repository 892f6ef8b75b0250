// grad_qk: the two math warpgroups.
#pragma once

#include "cuda/sm90/common/ds_barriers.cuh"
#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qk/panels.cuh"
#include "cuda/sm90/grad_qk/trace.cuh"

namespace tfla::cuda::sm90::grad_qk {

// This thread's rows plus by.x and by.y times a vector in global memory, of which `valid` numbers are there.
template <int R>
__device__ __forceinline__ void add_outer(float (&sum)[R], float2 by, const float* vector, int pair, int valid) {
#pragma unroll
  for (int n = 0; n < R / 4; ++n) {
    if (8 * n >= valid) break;
    const float2 x = *reinterpret_cast<const float2*>(vector + 8 * n + pair);
    sum[4 * n] = fmaf(by.x, x.x, sum[4 * n]);
    sum[4 * n + 1] = fmaf(by.x, x.y, sum[4 * n + 1]);
    sum[4 * n + 2] = fmaf(by.y, x.x, sum[4 * n + 2]);
    sum[4 * n + 3] = fmaf(by.y, x.y, sum[4 * n + 3]);
  }
}

// Math warpgroup W owns keys and queries of token block W (see scores.cuh). C::norm: n is one more column of C, with
// ones for v, deta for dh and dn for dC.
template <class C, int W>
struct Math {
  static constexpr int registers = C::math_registers[W];
  using T = typename C::T;
  using S = Shared<C>;
  using Gates = typename S::Gates;
  using Ds = DsBarriers<W, math_0_barrier, ds_written, ds_read>;
  static constexpr int first_query = W * token_block, queries = chunk_tokens - first_query;  // that see its keys
  static constexpr unsigned own = W * panel_bytes;  // where its rows begin in a chunk panel
  static constexpr unsigned query_rows = first_query * panel_row_bytes;
  // Whether the number of the tile, and which one is the last, come with the gate vectors: no registers keep them.
  static constexpr bool is_told = C::packed || (C::norm && !C::scaled);

  using Scores = float[queries / 2];
  using Sum = float[tile_columns / 2];
  // Of one tile. Panels are added to zeros: sums that the first one overwrites would be kept from tile to tile.
  struct Sums {
    Scores dP = {};  // keys in rows
    Sum dQ = {};
    Sum dK = {};
  };

  const Work& work;
  unsigned memory;
  float trace = 0;  // of the tile: this thread's share of <C, dC>
  PanelRing<C> ring;
  unsigned parity = 0;  // of the tiles before this one

  __device__ __forceinline__ Math(const Work& w, unsigned m) : work(w), memory(m) {}

  __device__ __forceinline__ Barriers<C> barriers() const { return {memory}; }
  __device__ __forceinline__ unsigned take(Slot slot) const { return ring.take(memory, slot); }
  __device__ __forceinline__ void give_back(Slot slot) const { ring.give_back(memory, slot); }
  __device__ __forceinline__ unsigned q() const { return memory + S::q; }
  __device__ __forceinline__ unsigned k() const { return memory + S::k; }
  __device__ __forceinline__ unsigned ds(int query_block) const {
    return memory + S::ds + query_block * chunk_panel_bytes;
  }

  // dP += V dH^T, dK += V dC^T and dQ += dH C^T over the next panel, as three batches in flight in this order.
  __device__ __forceinline__ void begin_panel(Sums& sums) {
    const unsigned v = take(slot_v), dh = take(slot_dh);
    arch::products_begin();
    multiply_panel<T>(sums.dP, v, own, dh, query_rows, true);
    arch::products_commit();
    const unsigned dC = take(slot_dC);
    arch::products_begin();
    multiply_panel<T>(sums.dK, v, own, dC, 0, true);
    arch::products_commit();
    const unsigned state = take(slot_C);
    arch::products_begin();
    multiply_panel<T>(sums.dQ, dh, own, state, 0, true);
    arch::products_commit();
    if constexpr (W == 1) {
      if (work.traces != nullptr) add_trace<C>(trace, dC + threadIdx.x % warpgroup_threads * 16);
    }
  }
  // Waits for dK and dQ, and gives back what the panel's products read.
  __device__ __forceinline__ void finish_panel(Sums& sums) {
    arch::products_wait<1>();
    give_back(slot_v);
    give_back(slot_dC);
    arch::products_wait<0>();
    arch::pin(sums.dK);
    arch::pin(sums.dQ);
    give_back(slot_dh);
    give_back(slot_C);
    ring.advance();
  }
  // float16: see `rescaling`.
  __device__ __forceinline__ void rescale(Sums& sums, unsigned tile, int from, int to) {
    const auto by = rescaling<C>(work, memory, parity, tile, from, to);
    const float2 of_dC = by(work.chunks.inverse_scale_dC), of_C = by(work.chunks.inverse_scale_C);
    scale_rows(sums.dK, of_dC);
    scale_rows(sums.dQ, of_C);
    trace *= of_dC.x * of_C.x;
  }

  // dP += deta of its query.
  __device__ __forceinline__ void add_deta(Scores& dP) {
    const unsigned deta = memory + Gates::deta + (first_query + ChunkLane<W>().pair) * 4;
#pragma unroll
    for (int n = 0; n < queries / 8; ++n) {
      const float2 pair = arch::read_float2(deta + 32 * n);
      dP[4 * n] += pair.x;
      dP[4 * n + 1] += pair.y;
      dP[4 * n + 2] += pair.x;
      dP[4 * n + 3] += pair.y;
    }
  }

  // dS = dP . D of 64 queries into shared memory, as [key][query].
  __device__ __forceinline__ void share_block(const float (&dP)[token_block / 2], int query_block, float scale) {
    const ChunkLane<W> my;
    const int query = query_block * token_block + my.pair;
    std::uint32_t gated[token_block / 16][4];
    gate_block<T, Gates, W>(dP, gated, memory, query, my.row - query, scale);
#pragma unroll
    for (int n = 0; n < token_block / 16; ++n)
      arch::store_tiles((ds(query_block) + my.chunk_panel_row) ^ (n << 5), gated[n][0], gated[n][1], gated[n][2],
                        gated[n][3]);
  }
  // All of dS, while dK and dQ of the last panel are in flight. Returns its scale16.
  __device__ __forceinline__ float share_scores(Scores& dP) {
    arch::wait(barriers().gates_full(), parity);
    if constexpr (C::norm) add_deta(dP);
    float scale = 1;
    if constexpr (C::scaled) scale = scale16_of_all<Gates, W>(dP, memory, memory + S::largest, parity, largest_barrier);
    arch::wait(barriers().ds_empty(), parity ^ 1);
#pragma unroll
    for (int block = 0; block < queries / token_block; ++block)
      share_block(reinterpret_cast<const float(&)[token_block / 2]>(dP[block * token_block / 2]), W + block, scale);
    arch::writes_before_copies();
    return scale;
  }

  // The terms of dK and dQ that come through the states: with n, times abar and qbar. On return nobody of this
  // warpgroup reads the gate vectors. Returns where the tile's vectors begin.
  __device__ __forceinline__ TileInfo finish_first_terms(unsigned tile, Sum& dQ, Sum& dK) {
    const ChunkLane<W> my;
    if constexpr (C::norm) {
      const NormColumns norm(work, tile);
      const unsigned deta = memory + Gates::deta + my.row * 4;
      add_outer(dK, {1, 1}, norm.dn, my.pair, norm.columns);
      add_outer(dQ, {arch::read_float(deta), arch::read_float(deta + 32)}, norm.n, my.pair, norm.columns);
    }
    TileInfo info = TileInfo::read(memory + Gates::info);
    if (!C::packed && !C::norm)  // see ColumnGates::vectors_before
      info.words.x += static_cast<int>(work.tiles.column_tile_of(tile)) * work.chunks.heads * work.chunks.all_tokens;
    scale_rows(dK, abar<Gates, W>(memory));
    scale_rows(dQ, qbar<Gates, W>(memory));
    __syncwarp();
    if (my.leads) arch::arrive(barriers().gates_empty());
    return info;
  }

  // dK += dS^T Q and dQ += dS K, as two batches in flight on return.
  __device__ __forceinline__ void begin_second_terms(Sum& dQ, Sum& dK, float scale) {
    if constexpr (C::scaled) {
      scale_rows(dK, {scale, scale});
      scale_rows(dQ, {scale, scale});
    }
    arch::pin(dK);
    arch::pin(dQ);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < queries / 16; ++step)
      arch::multiply<T, Major::depth, Major::across>(
          dK, arch::tile_at(ds(W + step / 4), own + step % 4 * 32),
          arch::tile_at(q(), query_rows + step * step_rows_bytes, chunk_panel_bytes), true);
    arch::products_commit();
#pragma unroll
    for (int step = 0; step < (W + 1) * token_block / 16; ++step)
      arch::multiply<T, Major::across, Major::across>(dQ, arch::tile_at(ds(W), step * step_rows_bytes),
                                                      arch::tile_at(k(), step * step_rows_bytes, chunk_panel_bytes),
                                                      true);
    arch::products_commit();
  }

  // dK = abar dK + dS^T Q, dQ = qbar dQ + dS K, and what is summed over their rows. Returns whether it is told that the
  // tile is the last one.
  __device__ __forceinline__ bool finish(unsigned tile, Sum& dQ, Sum& dK, float scale) {
    const ChunkLane<W> my;
    if constexpr (is_told) tile = tile_from_gates<C>(memory);
    if constexpr (W == 1) {
      if (work.traces != nullptr) store_trace<C>(trace, work, memory, tile);
    }
    const TileInfo info = finish_first_terms(tile, dQ, dK);
    arch::wait(barriers().k_full(), parity);
    info.write_rows(work.outflow, my.row, row_dots<T>(dK, k() + my.chunk_panel_row));
    arch::wait(barriers().q_full(), parity);
    Ds::wait_for_ds();
    begin_second_terms(dQ, dK, scale);
    arch::products_wait<1>();
    arch::pin(dK);
    Ds::has_read();
    const float inverse = inverse_power(scale);
    float2 dots = row_dots<T>(dK, k() + my.chunk_panel_row);
    if (C::scaled) dots = times(dots, inverse);
    info.write_rows(work.column_sums, my.row, dots);
    arch::products_wait<0>();
    arch::pin(dQ);
    dots = row_dots<T>(dQ, q() + my.chunk_panel_row);
    if (C::scaled) dots = times(dots, inverse);
    info.write_rows(work.row_sums, my.row, dots);
    __syncwarp();
    if (my.leads) arch::arrive(W == 0 ? barriers().k_empty() : barriers().q_empty());
    Ds::wait_for_readers();
    stage<T>(dK, (W == 0 ? q() : k()) + my.chunk_panel_row, chunk_panel_bytes, barriers().dk_staged(), my.leads,
             {inverse, inverse});
    stage<T>(dQ, ds(W) + my.panel_row, panel_bytes, barriers().dq_staged(), my.leads, {inverse, inverse});
    return is_told && info.is_last();
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned tile = blockIdx.x; is_told || tile < work.tiles.tiles; tile += gridDim.x, parity ^= 1) {
      Sums sums;
#pragma unroll 1
      for (int t = 1; t < work.dhv_panels; ++t) {
        begin_panel(sums);
        finish_panel(sums);
        arch::pin(sums.dP);
        if constexpr (C::scaled) {
          if (t % state_panels == 0) rescale(sums, tile, t / state_panels - 1, t / state_panels);
        }
      }
      begin_panel(sums);
      arch::products_wait<2>();
      arch::pin(sums.dP);
      const float scale = share_scores(sums.dP);
      finish_panel(sums);
      if constexpr (C::scaled) rescale(sums, tile, (work.dhv_panels - 1) / state_panels, work.dhv_panels);
      if (finish(tile, sums.dQ, sums.dK, scale)) return;
    }
  }
};

}  // namespace tfla::cuda::sm90::grad_qk
