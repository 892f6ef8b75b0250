// Stage `keys` on Hopper: the two warpgroups that multiply.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::keys {

// Rows g and g + 8 of this thread, plus by.x and by.y times a vector in global memory, of which `valid` numbers are
// there.
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

// Consumer 1 has half the scores. Norms: n is one more column of C, with ones for v, deta for dh and dn for dC.
template <class T, int W, bool Packed, bool Norms>
struct Consumer : RingReader<W, Packed> {
  using Base = RingReader<W, Packed>;
  using Base::barriers, Base::give_back, Base::take;
  using Base::first_query, Base::own, Base::queries, Base::query_rows;
  using Base::memory, Base::panels, Base::parity, Base::work;
  static constexpr unsigned step_rows = 16 * row_bytes;  // of a step of a product along rows
  static constexpr bool lifted = needs_scale16<T>;
  // The number of the tile, and which one is the last, come with the gate vectors: not to be kept in registers.
  static constexpr bool told = Packed || (Norms && !lifted);

  float trace = 0;  // of the tile: this thread's share of <C, dC>

  // Of one tile. Panels are added to zeros: sums that the first one overwrites would be kept from tile to tile.
  struct Sums {
    float dP[queries / 2] = {};  // keys in rows
    float dQ[columns / 2] = {};
    float dK[columns / 2] = {};
  };

  __device__ __forceinline__ Consumer(const Work& w, unsigned m) : Base(w, m) {}

  __device__ __forceinline__ unsigned q() const { return memory + Plan::q; }
  __device__ __forceinline__ unsigned k() const { return memory + Plan::k; }
  __device__ __forceinline__ unsigned ds(int half_of_queries) const {
    return memory + Plan::ds + half_of_queries * slot_bytes;
  }

  // dP += V dH^T, dK += V dC^T and dQ += dH C^T over the next panel, as three batches in this order.
  __device__ __forceinline__ void multiply_next(Sums& sums) {
    static_assert(Plan::stages == 2);
    const unsigned v = take(slot_v), dh = take(slot_dh);
    arch::products_begin();
    multiply_panel<T>(sums.dP, v, own, dh, query_rows, true);
    arch::products_commit();
    const unsigned dC = take(slot_dC);
    arch::products_begin();
    multiply_panel<T>(sums.dK, v, own, dC, 0, true);
    arch::products_commit();
    const unsigned C = take(slot_C);
    arch::products_begin();
    multiply_panel<T>(sums.dQ, dh, own, C, 0, true);
    arch::products_commit();
    if constexpr (W == 1) {
      if (work.traces != nullptr) trace_panel(dC + threadIdx.x % warpgroup * 16);
    }
  }

  // Adds <C, dC> over the panel, while its products are under way. The order does not matter: both are read as they
  // lie.
  __device__ __forceinline__ void trace_panel(unsigned dC) {
    constexpr unsigned step_bytes = warpgroup * 16;
    float parts[4]{};
#pragma unroll
    for (unsigned at = 0; at < slot_bytes; at += step_bytes) {
      const uint4 x = arch::read_quad(dC + at), y = arch::read_quad(dC + (slot_C - slot_dC) * slot_bytes + at);
      const auto add = [&](std::uint32_t a, std::uint32_t b, float& even, float& odd) {
        const float2 pair = widen(a), other = widen(b);
        even = fmaf(pair.x, other.x, even);
        odd = fmaf(pair.y, other.y, odd);
      };
      add(x.x, y.x, parts[0], parts[1]);
      add(x.y, y.y, parts[2], parts[3]);
      add(x.z, y.z, parts[0], parts[1]);
      add(x.w, y.w, parts[2], parts[3]);
    }
    trace += (parts[0] + parts[1]) + (parts[2] + parts[3]);
    __syncwarp();  // all lanes have read what one of them gives back
  }
  __device__ __forceinline__ static float2 widen(std::uint32_t pair) {
    if constexpr (lifted)
      return arch::unpack(pair, T{});
    else
      return arch::widen_pair(pair);
  }

  // The share of this warp in gbar <C, dC>, and <n, dn>.
  __device__ __forceinline__ void store_trace(unsigned tile) {
    const unsigned unit = work.parts.chunk_of(tile), warp = threadIdx.x % warpgroup / 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) trace += __shfl_xor_sync(0xFFFFFFFFU, trace, offset);
    double sum = trace;
    if (Norms && warp == 0) sum += static_cast<double>(__int_as_float(arch::read_int2(memory + Plan::Gates::index).y));
    if (threadIdx.x % 32 == 0)
      work.traces[(static_cast<std::int64_t>(unit) * work.parts.count + work.parts.part_of(tile)) * trace_warps +
                  warp] = sum * static_cast<double>(work.decays[unit]);
    trace = 0;
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
    ++panels;
  }

  __device__ __forceinline__ void lower(Sums& sums, unsigned tile, int from, int to) {
    const auto by = Base::lowering(tile, from, to);
    const float2 of_dC = by(work.chunks.dstate_inverse_scales), of_C = by(work.chunks.state_inverse_scales);
    scale_rows(sums.dK, of_dC);
    scale_rows(sums.dQ, of_C);
    trace *= of_dC.x * of_C.x;
  }

  // dS = dP . D of 64 queries into shared memory, as [key][query].
  __device__ __forceinline__ void share(const float (&dP)[half / 2], int half_of_queries, float lift) {
    const Lane<W> my;
    const float2 c0 = arch::read_float2(memory + Plan::Gates::c + my.row * 8);
    const float2 c1 = arch::read_float2(memory + Plan::Gates::c + (my.row + 8) * 8);
    const int query = half_of_queries * half + my.pair;
    std::uint32_t gated[half / 16][4];
    gate<T>(dP, gated, memory + Plan::Gates::u + query * 8, lifted_gate<T>(c0, lift), lifted_gate<T>(c1, lift),
            my.row - query);
#pragma unroll
    for (int n = 0; n < half / 16; ++n)
      arch::store_tiles((ds(half_of_queries) + my.panel_row) ^ (n << 5), gated[n][0], gated[n][1], gated[n][2],
                        gated[n][3]);
  }

  // All of it, while dK and dQ of the last panel are under way. Returns its lift (float16).
  __device__ __forceinline__ float share_scores(float (&dP)[queries / 2]) {
    arch::wait(barriers().gates_full(), parity);
    if constexpr (Norms) {
      const unsigned etas = memory + Plan::Gates::etas + (first_query + Lane<W>().pair) * 4;
#pragma unroll
      for (int n = 0; n < queries / 8; ++n) {
        const float2 eta = arch::read_float2(etas + 32 * n);
        dP[4 * n] += eta.x;
        dP[4 * n + 1] += eta.y;
        dP[4 * n + 2] += eta.x;
        dP[4 * n + 3] += eta.y;
      }
    }
    float lift = 1;
    if constexpr (lifted)
      lift = scale16_of_all<W>(dP, memory + Plan::Gates::u, memory + Plan::Gates::c, memory + Plan::largest, parity);
    arch::wait(barriers().ds_empty(), parity ^ 1);
#pragma unroll
    for (int h = 0; h < queries / half; ++h)
      share(reinterpret_cast<const float(&)[half / 2]>(dP[h * half / 2]), W + h, lift);
    arch::writes_before_copies();
    return lift;
  }

  // Consumer 0 does. racecheck loses track of warps some of which meet more often than others: there both consumers do.
  __device__ __forceinline__ static void meet_own_warps() {
    if constexpr (W == 0 || arch::for_racecheck)
      arch::named_wait(own_barrier, arch::for_racecheck ? 2 * warpgroup : warpgroup);
  }

  // dK = abar dK + dS^T Q, dQ = qbar dQ + dS K, and what is summed over their rows. Whether it is told to be the last
  // tile.
  __device__ __forceinline__ bool finish(unsigned tile, float (&dQ)[columns / 2], float (&dK)[columns / 2],
                                         float lift) {
    const Lane<W> my;
    if constexpr (told) tile = static_cast<unsigned>(arch::read_int2(memory + Plan::Gates::index).x);
    if constexpr (W == 1) {
      if (work.traces != nullptr) store_trace(tile);
    }
    if constexpr (Norms) {
      const NormPart norms(work, tile);
      const unsigned etas = memory + Plan::Gates::etas + my.row * 4;
      add_outer(dK, {1, 1}, norms.dn, my.pair, norms.columns);
      add_outer(dQ, {arch::read_float(etas), arch::read_float(etas + 32)}, norms.n, my.pair, norms.columns);
    }
    int2 vectors = arch::read_int2(memory + Plan::Gates::vectors);
    if (!Packed && !Norms)
      vectors.x += static_cast<int>(work.parts.part_of(tile)) * work.chunks.heads * work.chunks.all_tokens;
    scale_rows(dK, row_weights<W>(memory + Plan::Gates::c, memory + Plan::Gates::outflow));
    scale_rows(dQ, row_weights<W>(memory + Plan::Gates::u, memory + Plan::Gates::inflow));
    __syncwarp();
    if (my.leads) arch::arrive(barriers().gates_empty());
    arch::wait(barriers().k_full(), parity);
    write_rows(work.outflow, vectors, my.row, row_dots<T>(dK, k() + my.panel_row));
    arch::wait(barriers().q_full(), parity);
    // Consumer 0 needs what it wrote of dS, consumer 1 what both did.
    if constexpr (W == 0)
      arch::named_arrive(ds_is_written, 2 * warpgroup);
    else
      arch::named_wait(ds_is_written, 2 * warpgroup);
    meet_own_warps();
    if constexpr (lifted) {
      scale_rows(dK, {lift, lift});
      scale_rows(dQ, {lift, lift});
    }
    arch::pin(dK);
    arch::pin(dQ);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < queries / 16; ++step)
      arch::multiply<T, Major::depth, Major::across>(dK, arch::tile_at(ds(W + step / 4), own + step % 4 * 32),
                                                     arch::tile_at(q(), query_rows + step * step_rows, slot_bytes),
                                                     true);
    arch::products_commit();
#pragma unroll
    for (int step = 0; step < (W + 1) * half / 16; ++step)
      arch::multiply<T, Major::across, Major::across>(dQ, arch::tile_at(ds(W), step * step_rows),
                                                      arch::tile_at(k(), step * step_rows, slot_bytes), true);
    arch::products_commit();
    arch::products_wait<1>();
    arch::pin(dK);
    if constexpr (W == 0) arch::named_arrive(ds_is_read, 2 * warpgroup);
    const float lower = inverse_power(lift);
    float2 dots = row_dots<T>(dK, k() + my.panel_row);
    if (lifted) dots = times(dots, lower);
    write_rows(work.column_sums, vectors, my.row, dots);
    arch::products_wait<0>();
    arch::pin(dQ);
    dots = row_dots<T>(dQ, q() + my.panel_row);
    if (lifted) dots = times(dots, lower);
    write_rows(work.row_sums, vectors, my.row, dots);
    __syncwarp();
    if (my.leads) arch::arrive(W == 0 ? barriers().k_empty() : barriers().q_empty());
    // All products have read what results go into: consumer 0 too, whose keys have queries of consumer 1.
    if constexpr (W == 1) arch::named_wait(ds_is_read, 2 * warpgroup);
    meet_own_warps();
    stage<T>(dK, (W == 0 ? q() : k()) + my.panel_row, slot_bytes, barriers().dk_staged(), my.leads, {lower, lower});
    stage<T>(dQ, ds(W) + my.half_row, half_bytes, barriers().dq_staged(), my.leads, {lower, lower});
    return told && vectors.y >= last_tile;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned tile = blockIdx.x; told || tile < work.parts.tiles; tile += gridDim.x, parity ^= 1) {
      Sums sums;
#pragma unroll 1
      for (int t = 1; t < work.dhv_panels; ++t) {
        multiply_next(sums);
        finish_panel(sums);
        arch::pin(sums.dP);
        if constexpr (lifted) {
          if (t % state_panels == 0) lower(sums, tile, t / state_panels - 1, t / state_panels);
        }
      }
      multiply_next(sums);
      arch::products_wait<2>();
      arch::pin(sums.dP);
      const float lift = share_scores(sums.dP);
      finish_panel(sums);
      if constexpr (lifted) lower(sums, tile, (work.dhv_panels - 1) / state_panels, work.dhv_panels);
      if (finish(tile, sums.dQ, sums.dK, lift)) return;
    }
  }
};

}  // namespace tfla::cuda::sm90::keys
