// grad_qkv: the two math warpgroups.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qkv/shared.cuh"

namespace tfla::cuda::sm90::grad_qkv {

// Math warpgroup W owns keys and queries of token block W (see scores.cuh).
template <class C, int W>
struct Math {
  static constexpr int registers = C::math_registers[W];
  using T = typename C::T;
  using S = Shared<C>;
  using B = Barriers<C>;
  using Gates = typename S::Gates;
  static constexpr int first_query = W * token_block, queries = chunk_tokens - first_query;  // that see its keys
  static constexpr unsigned own = W * panel_bytes;  // where its rows begin in a chunk panel
  static constexpr unsigned query_rows = first_query * panel_row_bytes;
  static constexpr int own_barrier = W == 0 ? math_0_barrier : math_1_barrier;

  using Scores = float[queries / 2];             // S, then dP: as two arrays they would spill
  using Gated = std::uint32_t[queries / 16][4];  // P, then dS
  using Sum = float[C::dqk_panels * 32];

  const Work& work;
  unsigned memory;
  unsigned first_item = 0;  // items of the ring that the tiles before this one took
  Sum dK;                   // of this tile, and already of the next one while results are written (begins_next_tile)

  __device__ __forceinline__ Math(const Work& w, unsigned m) : work(w), memory(m) {}

  // Of the number of tiles before this one, which is first_item / ring_items: an odd factor keeps a number odd or even.
  __device__ __forceinline__ unsigned parity() const { return first_item >> S::even_factor & 1; }
  __device__ __forceinline__ B barriers() const { return {memory}; }
  __device__ __forceinline__ unsigned q() const { return memory + S::q; }
  __device__ __forceinline__ unsigned k() const { return memory + S::k; }
  __device__ __forceinline__ unsigned dh() const { return memory + S::dh; }
  __device__ __forceinline__ TileInfo info() const { return TileInfo::read(memory + Gates::info); }

  // Items of the ring. Their slots follow from first_item: a Ring would be two more numbers to keep, and spill.
  __device__ static constexpr int item_of_dC(int t) { return 2 * t; }
  __device__ static constexpr int item_of_v(int t) { return 2 * t + 1; }
  __device__ static constexpr int item_of_C(int t) { return 2 * C::dhv_panels + t; }
  __device__ static constexpr int item_of_ds(int query_block) { return 3 * C::dhv_panels + query_block; }
  __device__ __forceinline__ unsigned number(int item) const { return first_item + item; }
  __device__ __forceinline__ unsigned slot(int item) const {
    return memory + S::ring + number(item) % S::ring_slots * chunk_panel_bytes;
  }
  __device__ __forceinline__ unsigned ring_empty(int item) const {
    return barriers().ring_empty(number(item) % S::ring_slots);
  }
  __device__ __forceinline__ unsigned take(int item) const {
    arch::wait(barriers().ring_full(number(item) % S::ring_slots), number(item) / S::ring_slots & 1);
    return slot(item);
  }

  // dK = V_0 dC_0^T. For the next tile it begins before the results of this one are written: the tensor cores have work
  // meanwhile. It begins under no condition, since ptxas serializes products that are in flight over a branch.
  __device__ __forceinline__ void begin_dk(int item) {
    const unsigned dC = take(item), v = take(item + 1);
    arch::products_begin();
    multiply_panel<T>(dK, v, own, dC, 0, false);
    arch::products_commit();
  }

  // dV = K dC_t.
  __device__ __forceinline__ void begin_dv(float (&dV)[32], int t) {
    const unsigned dC = slot(item_of_dC(t));
#pragma unroll
    for (int step = 0; step < C::dqk_panels * 4; ++step)
      arch::multiply<T, Major::depth, Major::across>(
          dV, arch::tile_at(k(), step / 4 * chunk_panel_bytes + own + step % 4 * 32),
          arch::tile_at(dC, step * step_rows_bytes), step > 0);
    arch::products_commit();
  }

  // S^T = K Q^T and dV_0 = K dC_0; P while the second is in flight; dP = V_0 dH_0^T. scales: float16: of the rows of P.
  __device__ __forceinline__ void begin_panels(Scores& scores, Gated& gated, float (&dV)[32], float2& scales) {
    arch::wait(barriers().k_full(), parity());
    arch::wait(barriers().q_full(), parity());
    arch::products_begin();
#pragma unroll
    for (int p = 0; p < C::dqk_panels; ++p)
      multiply_panel<T>(scores, k(), p * chunk_panel_bytes + own, q(), p * chunk_panel_bytes + query_rows, p > 0);
    arch::products_commit();
    begin_dv(dV, 0);
    arch::wait(barriers().gates_full(), parity());
    arch::products_wait<1>();
    arch::pin(scores);
    arch::pin(dK);
    arch::wait(barriers().dh_full(0), parity());
    if constexpr (C::scaled)
      scales = gate_and_scale_rows<T, Gates, W>(scores, gated, memory);
    else
      gate_scores<T, Gates, W>(scores, gated, memory, 1);
    arch::products_begin();
    multiply_panel<T>(scores, slot(item_of_v(0)), own, dh(), query_rows, false);
    arch::products_commit();
    arch::products_wait<1>();
    arch::pin(dV);
  }

  // dV = abar K dC + P^T dH panel by panel, and with it dP and dK.
  __device__ __forceinline__ void make_dv(Scores& scores, Gated& gated) {
    float dV[32];
    float2 scales{1, 1};
    begin_panels(scores, gated, dV, scales);
    const ChunkLane<W> my;
    float2 weights = abar<Gates, W>(memory);
    if (C::scaled) weights = times(weights, scales);
    const float2 inverse_scales = inverse_powers(scales);
#pragma unroll
    for (int t = 0; t < C::dhv_panels; ++t) {
      if (t > 0) {
        arch::products_begin();
        begin_dv(dV, t);
        arch::products_wait<0>();
        arch::pin(dV);
        arch::pin(scores);
        arch::pin(dK);
      }
      if (my.leads) arch::arrive(ring_empty(item_of_dC(t)));
      scale_rows(dV, weights);
      arch::pin(dV);
      arch::products_begin();
#pragma unroll
      for (int step = 0; step < queries / 16; ++step)
        arch::multiply<T, Major::across>(
            dV, gated[step], arch::tile_at(dh(), t * chunk_panel_bytes + query_rows + step * step_rows_bytes), true);
      arch::products_commit();
      if (t + 1 < C::dhv_panels) {
        begin_next_panel(scores, t + 1);
        arch::products_wait<1>();
      } else {
        arch::products_wait<0>();
        arch::pin(scores);
        arch::pin(dK);
      }
      arch::pin(dV);
      if (my.leads_but_first) arch::arrive(ring_empty(item_of_v(t)));
      stage<T>(dV, slot(item_of_v(t)) + my.chunk_panel_row, 0, barriers().staged(B::dv_0 + t), my.leads,
               inverse_scales);
    }
  }
  // dP += V_t dH_t^T and dK += V_t dC_t^T, in flight on return.
  __device__ __forceinline__ void begin_next_panel(Scores& scores, int t) {
    arch::wait(barriers().dh_full(t), parity());
    const unsigned dC = take(item_of_dC(t)), v = take(item_of_v(t));
    arch::products_begin();
    multiply_panel<T>(scores, v, own, dh(), t * chunk_panel_bytes + query_rows, true);
    multiply_panel<T>(dK, v, own, dC, 0, true);
    arch::products_commit();
  }

  // dQ = dH C^T, in flight on return.
  __device__ __forceinline__ void begin_dq(Sum& dQ) {
#pragma unroll
    for (int t = 0; t < C::dhv_panels; ++t) {
      const unsigned C_t = take(item_of_C(t));
      arch::products_begin();
      multiply_panel<T>(dQ, dh(), t * chunk_panel_bytes + own, C_t, 0, t > 0);
      arch::products_commit();
    }
  }

  // The first term of dK, which is what flows out of the chunk, and dS. Returns the scale16 of dS, dK and dQ.
  __device__ __forceinline__ float make_ds(Scores& scores, Gated& gated) {
    const ChunkLane<W> my;
    float scale = 1;
    if constexpr (C::scaled) {
      arch::pin(scores);
      scale = scale16_of_all<Gates, W>(scores, memory, memory + S::largest, parity(), largest_barrier);
    }
    const float2 weights = abar<Gates, W>(memory);
    scale_rows(dK, C::scaled ? times(weights, scale) : weights);
    float2 outflow = row_dots<T>(dK, k() + my.chunk_panel_row);
    if (C::scaled) outflow = times(outflow, inverse_power(scale));
    info().write_rows(work.outflow, my.row, outflow);
    arch::pin(scores);
    gate_scores<T, Gates, W>(scores, gated, memory, scale);
    return scale;
  }

  // dS as [key][query], for dQ.
  __device__ __forceinline__ void share_gated(const Gated& gated) {
    const ChunkLane<W> my;
    const unsigned ds[2] = {take(item_of_ds(0)), take(item_of_ds(1))};
#pragma unroll
    for (int n = 0; n < queries / 16; ++n) {
      const unsigned row = ds[W == 0 && n < 4 ? 0 : 1] + my.chunk_panel_row;
      arch::store_tiles(row ^ (n % 4 << 5), gated[n][0], gated[n][1], gated[n][2], gated[n][3]);
    }
    arch::writes_before_copies();
  }

  // This warpgroup reads gates, C and dH no more.
  __device__ __forceinline__ void give_back_operands() {
    const ChunkLane<W> my;
    __syncwarp();
    if (my.leads) {
      arch::arrive(barriers().gates_empty());
#pragma unroll
      for (int t = 0; t < C::dhv_panels; ++t) arch::arrive(ring_empty(item_of_C(t)));
    }
#pragma unroll
    for (int t = 0; t < C::dhv_panels; ++t)
      if (t < S::dk_slot ? my.leads : my.leads_but_first) arch::arrive(barriers().dh_empty(t));
  }

  // dK += dS^T Q and dQ += dS K, as two batches in flight on return.
  __device__ __forceinline__ void begin_second_terms(Sum& dQ, const Gated& gated) {
    arch::pin(dK);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < queries / 16; ++step)
      arch::multiply<T, Major::across>(
          dK, gated[step], arch::tile_at(q(), query_rows + step * step_rows_bytes, chunk_panel_bytes), true);
    arch::products_commit();
    arch::named_wait(ds_written, 2 * warpgroup_threads);  // and nobody reads dH
    arch::pin(dQ);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < (W + 1) * token_block / 16; ++step)
      arch::multiply<T, Major::across, Major::across>(dQ, arch::tile_at(slot(item_of_ds(W)), step * step_rows_bytes),
                                                      arch::tile_at(k(), step * step_rows_bytes, chunk_panel_bytes),
                                                      true);
    arch::products_commit();
  }

  // dQ = qbar dH C^T + dS K and dK = abar V dC^T + dS^T Q, and all that is left of the tile. Returns whether it is the
  // last one.
  __device__ __forceinline__ bool make_dq_and_dk(Scores& scores, Gated& gated) {
    const ChunkLane<W> my;
    Sum dQ;
    begin_dq(dQ);
    const float scale = make_ds(scores, gated), inverse = inverse_power(scale);
    arch::products_wait<0>();
    arch::pin(dQ);
    const float2 weights = qbar<Gates, W>(memory);
    scale_rows(dQ, C::scaled ? times(weights, scale) : weights);
    const TileInfo tile = info();
    give_back_operands();
    share_gated(gated);
    begin_second_terms(dQ, gated);
    arch::products_wait<1>();
    arch::pin(dK);
    float2 kdk = row_dots<T>(dK, k() + my.chunk_panel_row);
    if (C::scaled) kdk = times(kdk, inverse);
    stage<T>(dK, dh() + S::dk_slot * chunk_panel_bytes + my.chunk_panel_row, chunk_panel_bytes,
             barriers().staged(B::dk), my.leads, {inverse, inverse});
    // The next tile waits for its Q and K: their places are given back before the sums with them are taken.
    std::uint32_t q_rows[C::dqk_panels * 4][4];
    load_rows<C::dqk_panels * 32>(q_rows, q() + my.chunk_panel_row);
    __syncwarp();
    if (my.leads) arch::arrive(barriers().q_empty());
    arch::products_wait<0>();
    arch::pin(dQ);
    if (my.leads) arch::arrive(barriers().k_empty());
    if (my.leads_but_first) {
      arch::arrive(ring_empty(item_of_ds(0)));
      arch::arrive(ring_empty(item_of_ds(1)));
    }
    if constexpr (C::begins_next_tile) begin_dk(S::ring_items);
    float2 qdq = row_dots<T>(dQ, q_rows);
    if (C::scaled) qdq = times(qdq, inverse);
    arch::named_wait(own_barrier, warpgroup_threads);  // all warps have read dS
    stage<T>(dQ, slot(item_of_ds(W)) + my.panel_row, panel_bytes, barriers().staged(B::dq), my.leads,
             {inverse, inverse});
    tile.write_rows(work.row_sums, my.row, qdq);
    tile.write_rows(work.column_sums, my.row, kdk);
    return tile.is_last();
  }

  __device__ __forceinline__ void run() {
    if constexpr (C::begins_next_tile) begin_dk(0);
#pragma unroll 1
    for (;; first_item += S::ring_items) {
      if constexpr (!C::begins_next_tile) begin_dk(0);
      Scores scores;
      Gated gated;
      make_dv(scores, gated);
      if (make_dq_and_dk(scores, gated)) break;
    }
    if constexpr (C::begins_next_tile) {
      arch::products_wait<0>();
      arch::pin(dK);
    }
  }
};

}  // namespace tfla::cuda::sm90::grad_qkv
