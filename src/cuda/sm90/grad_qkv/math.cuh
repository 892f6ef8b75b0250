// Stage `gradients` on Hopper: the two warpgroups that multiply.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qkv/shared.cuh"

namespace tfla::cuda::sm90::gradients {

// Consumer W has keys and queries from 64 W on. No query before its keys sees them: consumer 1 has half the scores.
template <class T, class Size, int W>
struct Consumer {
  using P = Plan<Size>;
  using B = Barriers<Size>;
  static constexpr int first_query = W * half, queries = chunk - first_query;
  static constexpr unsigned own = W * half_bytes;                  // of this consumer's rows in a slot
  static constexpr unsigned query_rows = first_query * row_bytes;  // of the queries that see its keys
  static constexpr unsigned step_rows = 16 * row_bytes;            // of a step of a product along rows
  static constexpr bool lifted = needs_scale16<T>;

  const Work& work;
  unsigned memory;
  unsigned first_item = 0;  // items of the tiles before this one

  float dK[Size::dqk * 32];                      // of this tile, and already of the next one while results are written
  using Scores = float[queries / 2];             // S, then dP: as two arrays they would spill
  using Gated = std::uint32_t[queries / 16][4];  // P, then dS

  __device__ __forceinline__ Consumer(const Work& w, unsigned m) : work(w), memory(m) {}

  // Of the number of tiles before: times the odd factor of ring_items it is as odd.
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
    for (int step = 0; step < Size::dqk * 4; ++step)
      arch::multiply<T, Major::depth, Major::across>(dV,
                                                     arch::tile_at(k(), step / 4 * slot_bytes + own + step % 4 * 32),
                                                     arch::tile_at(dC, step * step_rows), step > 0);
    arch::products_commit();
  }

  __device__ __forceinline__ float2 abar() const {
    return row_weights<W>(memory + P::Gates::c, memory + P::Gates::outflow);
  }
  __device__ __forceinline__ float2 qbar() const {  // times scale / den
    return row_weights<W>(memory + P::Gates::u, memory + P::Gates::inflow);
  }
  __device__ __forceinline__ void gate_all(const Scores& scores, Gated& gated, float lift) {
    gate_scores<T, W>(scores, gated, memory + P::Gates::u, memory + P::Gates::c, lift);
  }

  // S^T = K Q^T and dV_0 = K dC_0; P while the second is under way; dP = V_0 dH_0^T. lifts: of the rows of P (float16).
  __device__ __forceinline__ void begin_panels(Scores& scores, Gated& gated, float (&dV)[32], float2& lifts) {
    arch::wait(barriers().k_full(), parity());
    arch::wait(barriers().q_full(), parity());
    arch::products_begin();
#pragma unroll
    for (int p = 0; p < Size::dqk; ++p)
      multiply_panel<T>(scores, k(), p * slot_bytes + own, q(), p * slot_bytes + query_rows, p > 0);
    arch::products_commit();
    begin_dv(dV, 0);
    arch::wait(barriers().gates_full(), parity());
    arch::products_wait<1>();
    arch::pin(scores);
    arch::pin(dK);
    arch::wait(barriers().dh_full(0), parity());
    if constexpr (lifted)
      lifts = gate_rows<T, W>(scores, gated, memory + P::Gates::u, memory + P::Gates::c);
    else
      gate_all(scores, gated, 1);
    arch::products_begin();
    multiply_panel<T>(scores, slot(item_of_v(0)), own, dh(), query_rows, false);
    arch::products_commit();
    arch::products_wait<1>();
    arch::pin(dV);
  }

  // dV = abar K dC + P^T dH panel by panel, and with it dP and dK.
  __device__ __forceinline__ void panels(Scores& scores, Gated& gated) {
    float dV[32];
    float2 lifts{1, 1};
    begin_panels(scores, gated, dV, lifts);
    const Lane<W> my;
    float2 weights = abar();
    if (lifted) weights = {weights.x * lifts.x, weights.y * lifts.y};
    const float2 lowers = inverse_powers(lifts);
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
      scale_rows(dV, weights);
      arch::pin(dV);
      arch::products_begin();
#pragma unroll
      for (int step = 0; step < queries / 16; ++step)
        arch::multiply<T, Major::across>(dV, gated[step],
                                         arch::tile_at(dh(), t * slot_bytes + query_rows + step * step_rows), true);
      arch::products_commit();
      if (t + 1 < Size::dhv) {
        arch::wait(barriers().dh_full(t + 1), parity());
        const unsigned dC = take(item_of_dC(t + 1)), v = take(item_of_v(t + 1));
        arch::products_begin();
        multiply_panel<T>(scores, v, own, dh(), (t + 1) * slot_bytes + query_rows, true);
        multiply_panel<T>(dK, v, own, dC, 0, true);
        arch::products_commit();
        arch::products_wait<1>();
      } else {
        arch::products_wait<0>();
        arch::pin(scores);
        arch::pin(dK);
      }
      arch::pin(dV);
      if (my.leads_and_stays) arch::arrive(ring_empty(item_of_v(t)));
      stage<T>(dV, slot(item_of_v(t)) + my.panel_row, 0, barriers().staged(t), my.leads, lowers);
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
      multiply_panel<T>(dQ, dh(), t * slot_bytes + own, C, 0, t > 0);
      arch::products_commit();
    }
    // Meanwhile the first term of dK, which is what flows out of the chunk, and dS.
    float lift = 1;  // of dS, dK and dQ (float16)
    if constexpr (lifted) {
      arch::pin(scores);
      lift = scale16_of_all<W>(scores, memory + P::Gates::u, memory + P::Gates::c, memory + P::largest, parity());
    }
    const float lower = inverse_power(lift);
    scale_rows(dK, lifted ? times(abar(), lift) : abar());
    float2 flow = row_dots<T>(dK, k() + my.panel_row);
    if (lifted) flow = times(flow, lower);
    write_rows(work.outflow, arch::read_int2(memory + P::Gates::vectors), my.row, flow);
    arch::pin(scores);
    gate_all(scores, gated, lift);
    arch::products_wait<0>();
    arch::pin(dQ);
    scale_rows(dQ, lifted ? times(qbar(), lift) : qbar());
    const int2 vectors = arch::read_int2(memory + P::Gates::vectors);
    __syncwarp();
    if (my.leads) {
      arch::arrive(barriers().gates_empty());
#pragma unroll
      for (int t = 0; t < Size::dhv; ++t) arch::arrive(ring_empty(item_of_C(t)));
    }
#pragma unroll
    for (int t = 0; t < Size::dhv; ++t)
      if (t < P::dk_slot ? my.leads : my.leads_and_stays) arch::arrive(barriers().dh_empty(t));
    share_gated(gated);
    arch::pin(dK);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < queries / 16; ++step)
      arch::multiply<T, Major::across>(dK, gated[step], arch::tile_at(q(), query_rows + step * step_rows, slot_bytes),
                                       true);
    arch::products_commit();
    arch::named_wait(3, 2 * warpgroup);  // all of dS is there, and nobody reads dH
    arch::pin(dQ);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < (W + 1) * half / 16; ++step)
      arch::multiply<T, Major::across, Major::across>(dQ, arch::tile_at(slot(item_of_ds(W)), step * step_rows),
                                                      arch::tile_at(k(), step * step_rows, slot_bytes), true);
    arch::products_commit();
    arch::products_wait<1>();
    arch::pin(dK);
    float2 kdk = row_dots<T>(dK, k() + my.panel_row);
    if (lifted) kdk = times(kdk, lower);
    stage<T>(dK, dh() + P::dk_slot * slot_bytes + my.panel_row, slot_bytes, barriers().staged(B::dk_job), my.leads,
             {lower, lower});
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
    begin_dk(P::ring_items);
    float2 qdq = row_dots<T>(dQ, q_rows);
    if (lifted) qdq = times(qdq, lower);
    arch::named_wait(1 + W, warpgroup);  // dS is read
    stage<T>(dQ, slot(item_of_ds(W)) + my.half_row, half_bytes, barriers().staged(B::dq_job), my.leads, {lower, lower});
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

}  // namespace tfla::cuda::sm90::gradients
