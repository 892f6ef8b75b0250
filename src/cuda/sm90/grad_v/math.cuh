// grad_v: the two math warpgroups.
#pragma once

#include "cuda/sm90/common/ring.cuh"
#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_v/shared.cuh"

namespace tfla::cuda::sm90::grad_v {

// Math warpgroup W owns keys of token block W (see scores.cuh).
template <class C, int W>
struct Math {
  using T = typename C::T;
  using Gates = Shared::Gates;
  static constexpr int queries = chunk_tokens - W * token_block;  // that see its keys
  static constexpr unsigned own = W * panel_bytes;                // where its rows begin in chunk panels of K and Q
  static constexpr int steps = token_block / 16;                  // of a product over 64 columns, or 64 queries
  // Whether TileInfo says which tile is the last one. In float16 the warpgroup needs the numbers of its tiles, for the
  // scales of dC, and finds the tiles as the load thread does.
  static constexpr bool is_told = C::packed && !C::scaled;

  using Scores = float[queries / 2];
  using Gated = std::uint32_t[queries / 16][4];
  using Values = float[C::panels * 32];

  const Work& work;
  unsigned memory;
  Ring<Shared::ring_slots> ring;

  __device__ __forceinline__ Math(const Work& w, unsigned m) : work(w), memory(m) {}

  __device__ __forceinline__ Barriers barriers() const { return {memory}; }

  // The next item of the ring, when it is there.
  struct Item {
    unsigned at, empty;
  };
  __device__ __forceinline__ Item take() {
    const Item item{memory + Shared::ring + ring.slot * Shared::slot_bytes, barriers().ring_empty(ring.slot)};
    arch::wait(barriers().ring_full(ring.slot), ring.phase);
    ring.advance();
    return item;
  }

  // S^T += K Q^T and dV += K dC over a panel of dqk, as two batches in flight on return.
  __device__ __forceinline__ void add_panel(Scores& scores, Values& dV, Item& kq, Item& dC, bool add) {
    kq = take();
    arch::products_begin();
    multiply_panel<T>(scores, kq.at, own, kq.at, chunk_panel_bytes + own, add);
    arch::products_commit();
    dC = take();
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < steps; ++step)
      arch::multiply<T, Major::depth, Major::across>(dV, arch::tile_at(kq.at, own + step * 32),
                                                     arch::tile_at(dC.at, step * step_rows_bytes, panel_bytes),
                                                     add || step > 0);
    arch::products_commit();
  }

  // float16: tiles of dC, of 128 rows and 256 columns, have a scale16 each. Takes dV from the scale of the rows `from`
  // to that of the rows `to`; after the last ones, to its own.
  static constexpr int state_panels = 2, state_columns = 256;
  __device__ __forceinline__ void rescale(Values& dV, unsigned tile, int from, int to) {
    const auto column = static_cast<int>(work.tiles.column_tile_of(tile)) * C::panels * panel;
    const float* inverse_scales = work.chunks.inverse_scale_dC + work.tiles.chunk_of(tile) * work.state_tiles;
#pragma unroll
    for (int x = 0; x < C::panels; ++x) {
      const int at = min((column + x * panel) / state_columns, work.state_columns - 1);
      float by = inverse_scales[from * work.state_columns + at];
      if (to * state_panels < work.depth) by *= inverse_power(inverse_scales[to * work.state_columns + at]);
#pragma unroll
      for (int e = 0; e < 32; ++e) dV[32 * x + e] *= by;
    }
  }

  // All panels of dqk. The last product of dV is in flight on return. The first panel lies outside of the loop: sums
  // that begin there need no registers before.
  __device__ __forceinline__ void sum_over_dqk(Scores& scores, Values& dV, Item& kq, Item& dC, unsigned tile) {
    const ChunkLane<W> my;
    add_panel(scores, dV, kq, dC, false);
#pragma unroll 1
    for (int p = 1; p < work.depth; ++p) {
      if constexpr (C::scaled) {
        if (p % state_panels == 0) {
          arch::products_wait<0>();
          arch::pin(scores);
          arch::pin(dV);
          rescale(dV, tile, p / state_panels - 1, p / state_panels);
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
      arch::multiply<T, Major::across>(dV, gated[first_step + step],
                                       arch::tile_at(dh, step * step_rows_bytes, panel_bytes), true);
    arch::products_commit();
  }

  // dV += P^T dH. On return no warp reads the slot that this warpgroup's dV goes into. first, second: dH of the two
  // token blocks.
  __device__ __forceinline__ void add_all_queries(Values& dV, const Gated& gated, unsigned first, unsigned second) {
    arch::pin(dV);
    arch::products_begin();
    add_queries(dV, gated, W == 0 ? steps : 0, second);
    if constexpr (W == 0) {
      add_queries(dV, gated, 0, first);
      arch::products_wait<1>();
      arch::named_wait(dh_read, 2 * warpgroup_threads);
      arch::products_wait<0>();
      arch::named_wait(math_0_barrier, warpgroup_threads);
    } else {
      arch::products_wait<0>();
      arch::named_wait(dh_read, 2 * warpgroup_threads);
    }
    arch::pin(dV);
  }

  // Returns whether the tile is told to be the last one.
  __device__ __forceinline__ bool make_tile(unsigned index, unsigned parity) {
    const ChunkLane<W> my;
    Scores scores;
    Gated gated;
    Values dV;
    Item kq{}, dC{};
    sum_over_dqk(scores, dV, kq, dC, index);
    arch::wait(barriers().gates_full(), parity);
    float2 scales{1, 1};  // float16: of the rows of P, and of dV with them
    if constexpr (C::scaled)
      scales = gate_and_scale_rows<T, Gates, W>(scores, gated, memory);
    else
      gate_scores<T, Gates, W>(scores, gated, memory, 1);
    float2 weights = abar<Gates, W>(memory);
    if (C::scaled) weights = times(weights, scales);
    const bool is_last = is_told && TileInfo::read(memory + Gates::info).is_last();
    __syncwarp();
    if (my.leads) arch::arrive(barriers().gates_empty());
    arch::products_wait<0>();
    arch::pin(dV);
    if (my.leads) {
      arch::arrive(kq.empty);
      arch::arrive(dC.empty);
    }
    if constexpr (C::scaled) rescale(dV, index, (work.depth - 1) / state_panels, work.depth);
    scale_rows(dV, weights);
    const Item first = take(), second = take();
    add_all_queries(dV, gated, first.at, second.at);
    if (my.leads_but_first) {
      arch::arrive(first.empty);
      arch::arrive(second.empty);
    }
    stage<T>(dV, (W == 0 ? first : second).at + my.panel_row, panel_bytes, barriers().staged(W, parity), my.leads,
             inverse_powers(scales));
    return is_last;
  }

  __device__ __forceinline__ void run() {
    unsigned parity = 0;
#pragma unroll 1
    for (unsigned index = C::scaled ? first_tile<C::packed>(work) : blockIdx.x; is_told || index < work.tiles.tiles;
         index = C::scaled ? tile_after<C::packed>(work, index) : index + gridDim.x, parity ^= 1)
      if (make_tile(index, parity)) return;
  }
};

}  // namespace tfla::cuda::sm90::grad_v
