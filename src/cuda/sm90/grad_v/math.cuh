// Stage `values` on Hopper: the two warpgroups that multiply.
#pragma once

#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_v/shared.cuh"

namespace tfla::cuda::sm90::values {

// Consumer W has keys from 64 W on, and the queries that see them.
template <class T, int Panels, int W, bool Packed>
struct Consumer {
  static constexpr int queries = chunk - W * half;
  static constexpr unsigned own = W * half_bytes;        // of this consumer's rows in a panel of K, and of Q's
  static constexpr unsigned step_rows = 16 * row_bytes;  // of a step of a product along rows
  static constexpr int steps = half / 16;                // of a product over a slot
  static constexpr bool lifted = needs_scale16<T>;
  // Which tile is the last one. In float16 its number is asked for, for the lifts of dC, and found as producers do.
  static constexpr bool told = Packed && !lifted;

  using Scores = float[queries / 2];
  using Gated = std::uint32_t[queries / 16][4];
  using Values = float[Panels * 32];

  const Work& work;
  unsigned memory;
  Ring<Plan::ring_slots> ring;

  __device__ __forceinline__ Consumer(const Work& w, unsigned m) : work(w), memory(m) {}

  __device__ __forceinline__ Barriers barriers() const { return {memory + Plan::barriers}; }

  // An item of the ring, when it is there.
  struct Item {
    unsigned at, empty;
  };
  __device__ __forceinline__ Item take() {
    const Item item{memory + Plan::ring + ring.slot * Plan::room, barriers().ring_empty(ring.slot)};
    arch::wait(barriers().ring_full(ring.slot), ring.phase);
    ring.advance();
    return item;
  }

  // A panel of S^T = K Q^T and of dV = K dC. Both are under way on return.
  __device__ __forceinline__ void add_panel(Scores& scores, Values& dV, Item& kq, Item& dC, bool add) {
    kq = take();
    arch::products_begin();
    multiply_panel<T>(scores, kq.at, own, kq.at, slot_bytes + own, add);
    arch::products_commit();
    dC = take();
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < steps; ++step)
      arch::multiply<T, Major::depth, Major::across>(dV, arch::tile_at(kq.at, own + step * 32),
                                                     arch::tile_at(dC.at, step * step_rows, half_bytes),
                                                     add || step > 0);
    arch::products_commit();
  }

  // float16: the rows of dC come in tiles whose lifts differ, 128 by 256 of them. What dV of one is, in terms of the
  // next one; after the last one, what it is.
  static constexpr int state_panels = 2, state_columns = 256;
  __device__ __forceinline__ void lower(Values& dV, unsigned tile, int from, int to) {
    const auto column = static_cast<int>(work.parts.part_of(tile)) * Panels * panel;
    const float* lowers = work.chunks.dstate_inverse_scales + work.parts.chunk_of(tile) * work.state_tiles;
#pragma unroll
    for (int x = 0; x < Panels; ++x) {
      const int at = min((column + x * panel) / state_columns, work.state_columns - 1);
      float by = lowers[from * work.state_columns + at];
      if (to * state_panels < work.depth) by *= inverse_power(lowers[to * work.state_columns + at]);
#pragma unroll
      for (int e = 0; e < 32; ++e) dV[32 * x + e] *= by;
    }
  }

  // All of them. The last of dV is under way on return. The first panel lies outside of the loop: sums that are known
  // to begin there need no registers before.
  __device__ __forceinline__ void sum_over_dqk(Scores& scores, Values& dV, Item& kq, Item& dC, unsigned tile) {
    const Lane<W> my;
    add_panel(scores, dV, kq, dC, false);
#pragma unroll 1
    for (int p = 1; p < work.depth; ++p) {
      if constexpr (lifted) {
        if (p % state_panels == 0) {
          arch::products_wait<0>();
          arch::pin(scores);
          arch::pin(dV);
          lower(dV, tile, p / state_panels - 1, p / state_panels);
        }
      }
      const Item before[2] = {kq, dC};
      add_panel(scores, dV, kq, dC, true);
      arch::products_wait<2>();
      if (my.leads) {
        arch::arrive(before[0].empty);
        arch::arrive(before[1].empty);
      }
    }
    arch::products_wait<1>();
    arch::pin(scores);
  }

  // dV += P^T dH of 64 queries.
  __device__ __forceinline__ void add_queries(Values& dV, const Gated& gated, int first_step, unsigned dh) {
#pragma unroll
    for (int step = 0; step < steps; ++step)
      arch::multiply<T, Major::across>(dV, gated[first_step + step], arch::tile_at(dh, step * step_rows, half_bytes),
                                       true);
    arch::products_commit();
  }

  // Whether it is told to be the last one.
  __device__ __forceinline__ bool tile(unsigned index, unsigned parity) {
    const Lane<W> my;
    Scores scores;
    Gated gated;
    Values dV;
    Item kq{}, dC{};
    sum_over_dqk(scores, dV, kq, dC, index);
    arch::wait(barriers().gates_full(), parity);
    float2 lifts{1, 1};  // of the rows of P, and of dV with them (float16)
    if constexpr (lifted)
      lifts = gate_rows<T, W>(scores, gated, memory + Plan::Gates::u, memory + Plan::Gates::c);
    else
      gate_scores<T, W>(scores, gated, memory + Plan::Gates::u, memory + Plan::Gates::c, 1);
    float2 abar = row_weights<W>(memory + Plan::Gates::c, memory + Plan::Gates::outflow);
    if (lifted) abar = {abar.x * lifts.x, abar.y * lifts.y};
    const bool last = told && arch::read_int2(memory + Plan::Gates::vectors).y >= last_tile;
    __syncwarp();
    if (my.leads) arch::arrive(barriers().gates_empty());
    arch::products_wait<0>();
    arch::pin(dV);
    if (my.leads) {
      arch::arrive(kq.empty);
      arch::arrive(dC.empty);
    }
    if constexpr (lifted) lower(dV, index, (work.depth - 1) / state_panels, work.depth);
    scale_rows(dV, abar);
    const Item first = take(), second = take();
    arch::pin(dV);
    arch::products_begin();
    add_queries(dV, gated, W == 0 ? steps : 0, second.at);
    if constexpr (W == 0) {
      add_queries(dV, gated, 0, first.at);
      arch::products_wait<1>();
      arch::named_wait(1, 2 * warpgroup);
      arch::products_wait<0>();
      arch::named_wait(2, warpgroup);  // no warp reads the first half of dH
    } else {
      arch::products_wait<0>();
      arch::named_wait(1, 2 * warpgroup);  // no warp reads the second half
    }
    arch::pin(dV);
    if (my.leads_and_stays) {
      arch::arrive(first.empty);
      arch::arrive(second.empty);
    }
    stage<T>(dV, (W == 0 ? first : second).at + my.half_row, half_bytes, barriers().staged(W, parity), my.leads,
             inverse_powers(lifts));
    return last;
  }

  __device__ __forceinline__ void run() {
    unsigned parity = 0;
#pragma unroll 1
    for (unsigned index = lifted ? first_tile<Packed>(work.chunks, work.parts) : blockIdx.x;
         told || index < work.parts.tiles;
         index = lifted ? tile_after<Packed>(work.chunks, work.parts, index) : index + gridDim.x, parity ^= 1)
      if (tile(index, parity)) return;
  }
};

}  // namespace tfla::cuda::sm90::values
