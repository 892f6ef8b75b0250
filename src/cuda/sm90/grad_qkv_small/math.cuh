// Stage `gradients` on Hopper for narrow heads: the two warpgroups that multiply.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qkv_small/shared.cuh"

namespace tfla::cuda::sm90::narrow {

// Consumer W has keys and queries from 64 W on. No query before its keys sees them: consumer 1 has half the scores.
// Width: columns of Q, K, V and dH that are multiplied.
template <class T, int Width, int W>
struct Consumer {
  using B = Barriers;
  using Sum = float[Width / 2];
  using Scores = float[half / 2];                  // of 64 queries: S or dP
  using Gated = std::uint32_t[half / 16][4];       // P or dS
  static constexpr int halves = 2 - W;             // of the queries that see its keys
  static constexpr unsigned own = W * half_bytes;  // of this consumer's rows in a slot
  static constexpr unsigned step_rows = 16 * row_bytes;
  static constexpr int all_dS = 3;  // named barriers; 1 + W: of this consumer

  const Work& work;
  unsigned memory;
  unsigned parity = 0;  // of the tile

  __device__ __forceinline__ Consumer(const Work& w, unsigned m) : work(w), memory(m) {}

  __device__ __forceinline__ B barriers() const { return {memory + Plan::barriers}; }
  __device__ __forceinline__ void await(B::Tensor tensor) const { arch::wait(barriers().full(tensor), parity); }

  // Sums that a product overwrites are kept alive by ptxas from one tile to the next, and spill. Not those that begin
  // with zeros.
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
    for (int step = 0; step < Width / 16; ++step)
      arch::multiply<T, Major::depth, Major::depth>(sum, arch::tile_at(memory + a, 32 * step),
                                                    arch::tile_at(memory + b, 32 * step), step > 0);
    arch::products_commit();
  }
  __device__ __forceinline__ float2 abar() const {
    return row_weights<W>(memory + Plan::Gates::c, memory + Plan::Gates::outflow);
  }
  __device__ __forceinline__ float2 qbar() const {  // times scale / den
    return row_weights<W>(memory + Plan::Gates::u, memory + Plan::Gates::inflow);
  }
  __device__ __forceinline__ int2 vectors() const { return arch::read_int2(memory + Plan::Gates::vectors); }

  // Of the queries from 64 Half on.
  template <int Half>
  __device__ __forceinline__ void gate_half(const Scores& scores, Gated& gated) const {
    const Lane<W> my;
    const unsigned c = memory + Plan::Gates::c + my.row * 8;
    const float2 c0 = arch::read_float2(c), c1 = arch::read_float2(c + 64);
    const int query = Half * half + my.pair;
    gate<T>(scores, gated, memory + Plan::Gates::u + query * 8, c0, c1, Half == W ? my.row - query : -chunk);
  }

  // dS as [key][query], for dQ.
  __device__ __forceinline__ void share(const Gated& gated, unsigned to) const {
    const unsigned row = memory + to + Lane<W>().half_row;
#pragma unroll
    for (int n = 0; n < half / 16; ++n)
      arch::store_tiles(row ^ (n << 5), gated[n][0], gated[n][1], gated[n][2], gated[n][3]);
    arch::writes_before_copies();
  }

  __device__ __forceinline__ void stage_sum(const Sum& sum, unsigned to, B::Result result) const {
    const Lane<W> my;
    stage<T>(sum, memory + to + my.half_row, 0, barriers().staged(result), my.leads, {1, 1});
  }

  __device__ __forceinline__ float2 dots(const Sum& sum, unsigned rows) const {
    return row_dots<T>(sum, memory + rows + Lane<W>().panel_row);
  }

  // P or dS of all queries that see the consumer's keys: from 64 W on, 64 at a time. begin(scores, half) begins their
  // product, ready(half) is called when they have been gated.
  template <class Begin, class Ready>
  __device__ __forceinline__ void gate_all(Scores& scores, Gated (&gated)[halves], const Begin& begin,
                                           const Ready& ready) const {
    arch::products_wait<0>();
    arch::pin(scores);
    gate_half<W>(scores, gated[0]);
    if constexpr (halves == 1) return ready(0);
    arch::pin(scores);
    begin(1);
    ready(0);
    arch::products_wait<0>();
    arch::pin(scores);
    gate_half<1>(scores, gated[halves - 1]);
    ready(1);
  }

  // sum = factor sum + A^T B: rows of B are queries.
  __device__ __forceinline__ void add_all(Sum& sum, const Gated (&gated)[halves], unsigned b) const {
    arch::pin(sum);
    arch::products_begin();
#pragma unroll
    for (int h = 0; h < halves; ++h)
#pragma unroll
      for (int step = 0; step < half / 16; ++step)
        arch::multiply<T, Major::across>(sum, gated[h][step],
                                         arch::tile_at(memory + b, own + h * half_bytes + step * step_rows), true);
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(sum);
  }

  // dK = abar V dC^T + dS^T Q, and dS.
  __device__ __forceinline__ void make_dk() const {
    const Lane<W> my;
    Scores dP;
    Gated dS[halves];
    const auto begin = [&](int h) {
      arch::products_begin();
      multiply_rows(dP, Plan::v + own, Plan::dh + own + h * half_bytes);
    };
    await(B::v);
    await(B::dh);
    clear(dP);
    begin(0);
    await(B::gates);
    arch::wait(barriers().stored(B::dq), parity ^ 1);  // it left through where dS goes
    gate_all(dP, dS, begin, [&](int h) { share(dS[h], h == 0 ? Plan::ds + own : Plan::ds_across); });
    if constexpr (W == 0) arch::named_arrive(all_dS, 2 * warpgroup);
    Sum dK;
    await(B::dC);
    clear(dK);
    arch::products_begin();
    multiply_rows(dK, Plan::v + own, Plan::dC);
    const float2 weights = abar();
    await(B::k);
    await(B::q);
    arch::products_wait<0>();
    arch::pin(dK);
    scale_rows(dK, weights);
    write_rows(work.outflow, vectors(), my.row, dots(dK, Plan::k));
    add_all(dK, dS, Plan::q);
    write_rows(work.column_sums, vectors(), my.row, dots(dK, Plan::k));
    stage_sum(dK, Plan::v + own, B::dk);
  }

  // dQ = qbar dH C^T + dS K.
  __device__ __forceinline__ void make_dq() const {
    const Lane<W> my;
    Sum dQ;
    await(B::C);
    clear(dQ);
    arch::products_begin();
    multiply_rows(dQ, Plan::dh + own, Plan::C);
    const float2 weights = qbar();
    W == 0 ? arch::named_wait(1 + W, warpgroup) : arch::named_wait(all_dS, 2 * warpgroup);
    arch::products_wait<0>();
    arch::pin(dQ);
    scale_rows(dQ, weights);
    arch::pin(dQ);
    arch::products_begin();
    const auto add = [&](unsigned dS, unsigned keys) {
#pragma unroll
      for (int step = 0; step < half / 16; ++step)
        arch::multiply<T, Major::across, Major::across>(dQ, arch::tile_at(memory + dS, step * step_rows),
                                                        arch::tile_at(memory + keys, step * step_rows), true);
    };
    if constexpr (W == 1) add(Plan::ds_across, Plan::k);
    add(Plan::ds + own, Plan::k + own);
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(dQ);
    write_rows(work.row_sums, vectors(), my.row, dots(dQ, Plan::q));
    arch::named_wait(1 + W, warpgroup);  // dS is read
    stage_sum(dQ, Plan::ds + own, B::dq);
  }

  // dV = abar K dC + P^T dH. It leaves through rows that nobody else reads: Q's, or K's. Whether the tile was the last.
  __device__ __forceinline__ bool make_dv() const {
    Scores S;
    Gated P[halves];
    const auto begin = [&](int h) {
      arch::products_begin();
      multiply_rows(S, Plan::k + own, Plan::q + own + h * half_bytes);
    };
    clear(S);
    begin(0);
    gate_all(S, P, begin, [](int) {});
    Sum dV;
    clear(dV);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < Width / 16; ++step)
      arch::multiply<T, Major::depth, Major::across>(dV, arch::tile_at(memory + Plan::k, own + 32 * step),
                                                     arch::tile_at(memory + Plan::dC, step * step_rows), step > 0);
    arch::products_commit();
    const float2 weights = abar();
    const bool last = vectors().y >= last_tile;
    arch::products_wait<0>();
    arch::pin(dV);
    scale_rows(dV, weights);
    add_all(dV, P, Plan::dh);
    if constexpr (W == 0) arch::named_wait(1 + W, warpgroup);  // all its warps have read Q
    stage_sum(dV, W == 0 ? Plan::q : Plan::k + own, B::dv);
    return last;
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

}  // namespace tfla::cuda::sm90::narrow
