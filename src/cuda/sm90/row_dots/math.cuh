// row_dots: the two math warpgroups.
#pragma once

#include "cuda/sm90/common/scores.cuh"
#include "cuda/sm90/grad_qk/panels.cuh"

namespace tfla::cuda::sm90::row_dots {

using namespace grad;
using grad_qk::Barriers, grad_qk::Shared, grad_qk::Slot, grad_qk::slot_C, grad_qk::slot_dh, grad_qk::slot_v,
    grad_qk::tile_columns, grad_qk::tile_panels;

// Math warpgroup W owns keys and queries of token block W (see scores.cuh).
template <class C, int W>
struct Math {
  using T = typename C::T;
  using S = Shared<C>;
  using Gates = typename S::Gates;
  static constexpr int first_query = W * token_block, queries = chunk_tokens - first_query;  // that see its keys
  static constexpr unsigned own = W * panel_bytes;  // where its rows begin in a chunk panel
  static constexpr unsigned query_rows = first_query * panel_row_bytes;

  using Scores = float[queries / 2];
  using Sum = float[tile_columns / 2];

  const grad_qk::Work& work;
  unsigned memory;
  unsigned next_panel = 0;  // its number, counted over all tiles
  unsigned parity = 0;      // of the tiles before this one

  __device__ __forceinline__ Math(const grad_qk::Work& w, unsigned m) : work(w), memory(m) {}

  __device__ __forceinline__ Barriers<C> barriers() const { return {memory}; }
  __device__ __forceinline__ unsigned take(Slot slot) const { return grad_qk::take<C>(memory, next_panel, slot); }
  __device__ __forceinline__ void give_back(Slot slot) const { grad_qk::give_back<C>(memory, next_panel, slot); }
  // Sums over the keys of each of the eight math warps, for even and odd tiles: in the place that grad_qk has for dS.
  __device__ __forceinline__ unsigned partial(int warp) const {
    constexpr unsigned partial_bytes = chunk_tokens * 4;
    return memory + S::ds + (parity * C::math_warps + warp) * partial_bytes;
  }

  // dP = V dH^T, with keys in rows, and dQ = dH C^T.
  __device__ __forceinline__ void multiply(unsigned tile, Scores& dP, Sum& dQ) {
#pragma unroll 1
    for (int t = 0; t < work.dhv_panels; ++t, ++next_panel) {
      const unsigned v = take(slot_v), dh = take(slot_dh);
      arch::products_begin();
      multiply_panel<T>(dP, v, own, dh, query_rows, true);
      arch::products_commit();
      const unsigned state = take(slot_C);
      arch::products_begin();
      multiply_panel<T>(dQ, dh, own, state, 0, true);
      arch::products_commit();
      arch::products_wait<1>();
      give_back(slot_v);
      arch::products_wait<0>();
      arch::pin(dP);
      arch::pin(dQ);
      give_back(slot_dh);
      give_back(slot_C);
      if constexpr (C::scaled) rescale(tile, dQ, t);
    }
  }
  // float16: after panel t, if it is the last of a tile of C. See grad_qk::rescaling.
  __device__ __forceinline__ void rescale(unsigned tile, Sum& dQ, int t) {
    using grad_qk::state_panels;
    const bool last = t + 1 == work.dhv_panels;
    const int from = t / state_panels;
    if (t % state_panels == state_panels - 1 || last)
      scale_rows(dQ, grad_qk::rescaling<C>(work, memory, parity, tile, from,
                                           last ? work.dhv_panels : from + 1)(work.chunks.inverse_scale_C));
  }

  // Sums over this warp's keys, to shared memory.
  __device__ __forceinline__ void sum_keys(const Scores& scores, const Scores& dP) {
    const ChunkLane<W> my;
    const unsigned to = partial(W * warpgroup_warps + static_cast<int>(threadIdx.x % warpgroup_threads / warp_threads));
    with_gates<Gates, W>(memory, [&](unsigned u, float2 c0, float2 c1, int ahead) {
      each_gated(scores, u, c0, c1, ahead, [&](int n, float x0, float x1, float x2, float x3) {
        float2 sum{x0 * dP[4 * n] + x2 * dP[4 * n + 2], x1 * dP[4 * n + 1] + x3 * dP[4 * n + 3]};
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          sum.x += __shfl_xor_sync(0xFFFFFFFFU, sum.x, offset);
          sum.y += __shfl_xor_sync(0xFFFFFFFFU, sum.y, offset);
        }
        if (threadIdx.x % warp_threads < 4) arch::write_float2(to + (first_query + 8 * n + my.pair) * 4, sum);
      });
    });
  }

  // Returns whether packed sequences say that the tile is the last one.
  __device__ __forceinline__ bool finish(unsigned tile, Scores& dP, Sum& dQ) {
    const ChunkLane<W> my;
    Scores scores = {};
    arch::wait(barriers().k_full(), parity);
    arch::wait(barriers().q_full(), parity);
    arch::products_begin();
#pragma unroll
    for (int p = 0; p < tile_panels; ++p)
      multiply_panel<T>(scores, memory + S::k + p * chunk_panel_bytes, own, memory + S::q + p * chunk_panel_bytes,
                        query_rows, true);
    arch::products_commit();
    arch::wait(barriers().gates_full(), parity);
    TileInfo info = TileInfo::read(memory + Gates::info);
    if (!C::packed)  // see ColumnGates::vectors_before
      info.words.x += static_cast<int>(work.tiles.column_tile_of(tile)) * work.vectors;
    scale_rows(dQ, qbar<Gates, W>(memory));
    float2 dots = grad::row_dots<T>(dQ, memory + S::q + my.chunk_panel_row);
    arch::products_wait<0>();
    arch::pin(scores);
    __syncwarp();
    if (my.leads) {
      arch::arrive(barriers().k_empty());
      arch::arrive(barriers().q_empty());
    }
    sum_keys(scores, dP);
    __syncwarp();
    if (my.leads) arch::arrive(barriers().gates_empty());
    arch::named_wait(grad_qk::ds_written, 2 * warpgroup_threads);  // here: partial sums
#pragma unroll
    for (int warp = 0; warp < (W + 1) * warpgroup_warps; ++warp) {
      dots.x += arch::read_float(partial(warp) + my.row * 4);
      dots.y += arch::read_float(partial(warp) + (my.row + 8) * 4);
    }
    info.write_rows(work.row_sums, my.row, dots);
    return C::packed && info.is_last();
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned tile = blockIdx.x; C::packed || tile < work.tiles.tiles; tile += gridDim.x, parity ^= 1) {
      Scores dP = {};
      Sum dQ = {};
      multiply(tile, dP, dQ);
      if (finish(tile, dP, dQ)) return;
    }
  }
};

}  // namespace tfla::cuda::sm90::row_dots
