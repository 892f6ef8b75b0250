// grad_qk_reverse: the two math warpgroups.
#pragma once

#include "cuda/sm90/common/ds_barriers.cuh"
#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qk_reverse/cta.cuh"

namespace tfla::cuda::sm90::grad_qk_reverse {

// Math warpgroup W owns keys and queries of token block W (see scores.cuh), and all 64 columns of dqk of the CTA.
template <class C, int W>
struct Math {
  using T = typename C::T;
  using S = Shared<C>;
  using Gates = typename S::Gates;
  using Ds = DsBarriers<W, math_0_barrier, ds_written, ds_read>;
  static constexpr int first_query = W * token_block, queries = chunk_tokens - first_query;  // that see its keys
  static constexpr unsigned own = W * panel_bytes;  // where its rows begin in a chunk panel
  static constexpr unsigned query_rows = first_query * panel_row_bytes;

  using Scores = float[queries / 2];
  using Sum = float[panel / 2];
  // Of one chunk. Panels are added to zeros: sums that the first one overwrites would be kept from chunk to chunk.
  struct Sums {
    Scores dP = {};  // keys in rows
    Sum dQ = {};
    Sum dK = {};
  };

  const Cta<C>& cta;
  unsigned chunks = 0, panels = 0;  // before this one

  __device__ __forceinline__ explicit Math(const Cta<C>& of) : cta(of) {}

  // Chunks are taken until one is the last.
  __device__ __forceinline__ void run() {
    if (C::packed && is_idle()) return;
    bool last = false;
    int last_panel = C::dhv_panels - 1;
    arch::forget(last_panel);  // a loop that the compiler knows to run once has its products serialized
#pragma unroll 1
    while (!last) {
      Sums sums;
#pragma unroll 1
      for (int t = 0; t < last_panel; ++t) {
        begin_panel(sums, t);
        finish_panel(sums);
        arch::pin(sums.dP);
      }
      begin_panel(sums, C::dhv_panels - 1);
      arch::products_wait<2>();
      arch::pin(sums.dP);
      share_scores(sums.dP);
      finish_panel(sums);
      __syncwarp();
      arrive(barriers().dC_empty());
      last = finish(sums.dQ, sums.dK);
      ++chunks;
    }
  }

 private:
  // Whether the CTA has no chunks at all.
  __device__ __forceinline__ bool is_idle() const {
    arch::wait(barriers().gates_full(), 0);
    return TileInfo::read(cta.memory + Gates::info).tokens() == 0;
  }
  __device__ __forceinline__ Barriers<C> barriers() const { return cta.barriers(); }
  __device__ __forceinline__ unsigned parity() const { return chunks & 1; }
  __device__ __forceinline__ unsigned q() const { return cta.memory + S::q + parity() * chunk_panel_bytes; }
  __device__ __forceinline__ unsigned k() const { return cta.memory + S::k; }
  __device__ __forceinline__ unsigned ds(int query_block) const {
    return cta.memory + S::ds + query_block * panel_bytes;
  }
  __device__ __forceinline__ static void arrive(unsigned barrier) {
    if (arch::arrives(threadIdx.x % warp_threads == 0)) arch::arrive(barrier);
  }
  template <Panels P>
  __device__ __forceinline__ unsigned take() const {
    const auto ring = RingOf<P>::at(panels);
    arch::wait(barriers().template ring_full<P>(ring.slot), ring.phase);
    return S::template slot<P>(cta.memory, ring.slot);
  }
  template <Panels P>
  __device__ __forceinline__ void give_back() const {
    arrive(barriers().template ring_empty<P>(RingOf<P>::at(panels).slot));
  }

  // dP += V dH^T, dQ += dH C^T and dK += V dC^T over a panel, as three batches in flight in this order.
  __device__ __forceinline__ void begin_panel(Sums& sums, int t) const {
    const unsigned dh = take<panels_dh>(), v = take<panels_v>();
    arch::products_begin();
    grad::multiply_panel<T>(sums.dP, v, own, dh, query_rows, true);
    arch::products_commit();
    const unsigned state = take<panels_C>();
    arch::products_begin();
    grad::multiply_panel<T>(sums.dQ, dh, own, state, 0, true);
    arch::products_commit();
    if (t == 0) arch::wait(barriers().dC_full(), parity());
    arch::products_begin();
    grad::multiply_panel<T>(sums.dK, v, own, cta.memory + S::dC + t * panel_bytes, 0, true);
    arch::products_commit();
  }
  // Waits for dQ and dK, and gives back what the panel's products read.
  __device__ __forceinline__ void finish_panel(Sums& sums) {
    arch::products_wait<1>();
    give_back<panels_dh>();
    give_back<panels_C>();
    arch::products_wait<0>();
    arch::pin(sums.dQ);
    arch::pin(sums.dK);
    give_back<panels_v>();
    ++panels;
  }

  // dS = dP . D of 64 queries into shared memory, as [key][query].
  __device__ __forceinline__ void share_block(const float (&dP)[token_block / 2], int query_block) const {
    const ChunkLane<W> my;
    const int query = query_block * token_block + my.pair;
    std::uint32_t gated[token_block / 16][4];
    gate_block<T, Gates, W>(dP, gated, cta.memory, query, my.row - query, 1);
#pragma unroll
    for (int n = 0; n < token_block / 16; ++n)
      arch::store_tiles((ds(query_block) + my.chunk_panel_row) ^ (n << 5), gated[n][0], gated[n][1], gated[n][2],
                        gated[n][3]);
  }
  // All of dS, while dK and dQ of the last panel are in flight.
  __device__ __forceinline__ void share_scores(const Scores& dP) const {
    arch::wait(barriers().gates_full(), parity());
    arch::wait(barriers().ds_empty(), parity() ^ 1);
#pragma unroll
    for (int block = 0; block < queries / token_block; ++block)
      share_block(reinterpret_cast<const float(&)[token_block / 2]>(dP[block * token_block / 2]), W + block);
    arch::writes_before_copies();
  }

  // dK += dS^T Q and dQ += dS K, as two batches in flight on return.
  __device__ __forceinline__ void begin_second_terms(Sum& dQ, Sum& dK) const {
    arch::pin(dK);
    arch::pin(dQ);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < queries / 16; ++step)
      arch::multiply<T, Major::depth, Major::across>(dK, arch::tile_at(ds(W + step / 4), own + step % 4 * 32),
                                                     arch::tile_at(q(), query_rows + step * step_rows_bytes), true);
    arch::products_commit();
#pragma unroll
    for (int step = 0; step < (W + 1) * token_block / 16; ++step)
      arch::multiply<T, Major::across, Major::across>(dQ, arch::tile_at(ds(W), step * step_rows_bytes),
                                                      arch::tile_at(k(), step * step_rows_bytes), true);
    arch::products_commit();
  }

  // dK = abar dK + dS^T Q, dQ = qbar dQ + dS K, and what is summed over their rows. Returns whether the chunk is the
  // last one.
  __device__ __forceinline__ bool finish(Sum& dQ, Sum& dK) const {
    const ChunkLane<W> my;
    const TileInfo info = TileInfo::read(cta.memory + Gates::info);
    scale_rows(dK, abar<Gates, W>(cta.memory));
    scale_rows(dQ, qbar<Gates, W>(cta.memory));
    __syncwarp();
    arrive(barriers().gates_empty());
    arch::wait(barriers().k_full(), parity());
    info.write_rows(cta.call.sums.outflow, my.row, row_dots<T>(dK, k() + my.chunk_panel_row));
    const int buffer = static_cast<int>(parity());
    const unsigned round = chunks / 2 & 1;
    arch::wait(barriers().q_full(buffer), round);
    Ds::wait_for_ds();
    begin_second_terms(dQ, dK);
    arch::products_wait<1>();
    arch::pin(dK);
    Ds::has_read();
    info.write_rows(cta.call.sums.columns, my.row, row_dots<T>(dK, k() + my.chunk_panel_row));
    arch::products_wait<0>();
    arch::pin(dQ);
    info.write_rows(cta.call.sums.rows, my.row, row_dots<T>(dQ, q() + my.chunk_panel_row));
    __syncwarp();
    arrive(W == 0 ? barriers().k_empty() : barriers().q_empty(buffer));
    if constexpr (W == 0) arch::wait(barriers().q_added(buffer), round);  // the state reads Q too
    Ds::wait_for_readers();
    stage<T>(dK, (W == 0 ? q() : k()) + my.chunk_panel_row, chunk_panel_bytes, barriers().dk_staged(), my.leads,
             {1, 1});
    stage<T>(dQ, ds(W) + my.panel_row, panel_bytes, barriers().dq_staged(), my.leads, {1, 1});
    return info.is_last();
  }
};

}  // namespace tfla::cuda::sm90::grad_qk_reverse
