// dh.h of every token, for deta: the warpgroups that multiply. Tiles, ring and gate vectors are those of stage `keys`.
//
// h is linear in q but for the denominator: dh_t.h_t = sum_s S_ts D_ts dP_ts + q_t.dQ_t, where dQ is what comes through
// the incoming state. Scores and their gradients meet in float32. q.dq as stage `keys` leaves it would be the same, but
// for the rounding of dS: where one token makes up most of h, the exact gradient is the difference of large numbers,
// and 2e-3 of them too much.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::keys {

template <class T, int W, bool Packed>
struct RowConsumer : RingReader<W, Packed> {
  using Base = RingReader<W, Packed>;
  using Base::barriers, Base::give_back, Base::take;
  using Base::first_query, Base::own, Base::queries, Base::query_rows;
  using Base::memory, Base::panels, Base::parity, Base::work;
  // Sums over the keys of each of the eight warps, of two tiles in turn: where Consumer has dS.
  static constexpr unsigned partial_bytes = chunk * 4;
  static constexpr int all_warps = 2 * warps_of_consumer;

  __device__ __forceinline__ RowConsumer(const Work& w, unsigned m) : Base(w, m) {}

  __device__ __forceinline__ unsigned partial(int warp) const {
    return memory + Plan::ds + (parity * all_warps + warp) * partial_bytes;
  }

  // dP = V dH^T, with keys in rows, and dQ = dH C^T.
  __device__ __forceinline__ void multiply(unsigned tile, float (&dP)[queries / 2], float (&dQ)[columns / 2]) {
#pragma unroll 1
    for (int t = 0; t < work.dhv_panels; ++t, ++panels) {
      const unsigned v = take(slot_v), dh = take(slot_dh);
      arch::products_begin();
      multiply_panel<T>(dP, v, own, dh, query_rows, true);
      arch::products_commit();
      const unsigned C = take(slot_C);
      arch::products_begin();
      multiply_panel<T>(dQ, dh, own, C, 0, true);
      arch::products_commit();
      arch::products_wait<1>();
      give_back(slot_v);
      arch::products_wait<0>();
      arch::pin(dP);
      arch::pin(dQ);
      give_back(slot_dh);
      give_back(slot_C);
      if constexpr (needs_scale16<T>) {
        const bool last = t + 1 == work.dhv_panels;
        const int from = t / state_panels;
        if (t % state_panels == state_panels - 1 || last)
          scale_rows(dQ,
                     Base::lowering(tile, from, last ? work.dhv_panels : from + 1)(work.chunks.state_inverse_scales));
      }
    }
  }

  // Sums over this warp's keys, to shared memory.
  __device__ __forceinline__ void sum_keys(const float (&S)[queries / 2], const float (&dP)[queries / 2]) {
    const Lane<W> my;
    const unsigned to = partial(W * warps_of_consumer + static_cast<int>(threadIdx.x % warpgroup / 32));
    with_gates<W>(memory + Plan::Gates::u, memory + Plan::Gates::c, [&](unsigned u, float2 c0, float2 c1, int ahead) {
      each_gated(S, u, c0, c1, ahead, [&](int n, float x0, float x1, float x2, float x3) {
        float2 sum{x0 * dP[4 * n] + x2 * dP[4 * n + 2], x1 * dP[4 * n + 1] + x3 * dP[4 * n + 3]};
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          sum.x += __shfl_xor_sync(0xFFFFFFFFU, sum.x, offset);
          sum.y += __shfl_xor_sync(0xFFFFFFFFU, sum.y, offset);
        }
        if (threadIdx.x % 32 < 4) arch::write_float2(to + (first_query + 8 * n + my.pair) * 4, sum);
      });
    });
  }

  // Whether the tile is told to be the last one of packed sequences.
  __device__ __forceinline__ bool finish(unsigned tile, float (&dP)[queries / 2], float (&dQ)[columns / 2]) {
    const Lane<W> my;
    float S[queries / 2] = {};
    arch::wait(barriers().k_full(), parity);
    arch::wait(barriers().q_full(), parity);
    arch::products_begin();
#pragma unroll
    for (int p = 0; p < column_panels; ++p)
      multiply_panel<T>(S, memory + Plan::k + p * slot_bytes, own, memory + Plan::q + p * slot_bytes, query_rows, true);
    arch::products_commit();
    arch::wait(barriers().gates_full(), parity);
    int2 vectors = arch::read_int2(memory + Plan::Gates::vectors);
    if (!Packed) vectors.x += static_cast<int>(work.parts.part_of(tile)) * work.vectors;
    scale_rows(dQ, row_weights<W>(memory + Plan::Gates::u, memory + Plan::Gates::inflow));
    float2 dots = row_dots<T>(dQ, memory + Plan::q + my.panel_row);
    arch::products_wait<0>();
    arch::pin(S);
    __syncwarp();
    if (my.leads) {
      arch::arrive(barriers().k_empty());
      arch::arrive(barriers().q_empty());
    }
    sum_keys(S, dP);
    __syncwarp();
    if (my.leads) arch::arrive(barriers().gates_empty());
    arch::named_wait(ds_is_written, 2 * warpgroup);
#pragma unroll
    for (int warp = 0; warp < (W + 1) * warps_of_consumer; ++warp) {
      dots.x += arch::read_float(partial(warp) + my.row * 4);
      dots.y += arch::read_float(partial(warp) + (my.row + 8) * 4);
    }
    write_rows(work.row_sums, vectors, my.row, dots);
    return Packed && vectors.y >= last_tile;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned tile = blockIdx.x; Packed || tile < work.parts.tiles; tile += gridDim.x, parity ^= 1) {
      float dP[queries / 2] = {}, dQ[columns / 2] = {};
      multiply(tile, dP, dQ);
      if (finish(tile, dP, dQ)) return;
    }
  }
};

}  // namespace tfla::cuda::sm90::keys
