// grad_qk_reverse: the warpgroup that has dC.
#pragma once

#include "cuda/sm90/grad_qk_reverse/cta.cuh"

namespace tfla::cuda::sm90::grad_qk_reverse {

// dC of 64 rows stays in registers over a segment. For every chunk, in reverse time, it is rounded into shared memory
// for the math warpgroups, then multiplied with C of the chunk for <C, dC>, then takes in the chunk:
//
//   dC <- gbar dC + (scale qbar / den Q)^T dH
template <class C>
struct State {
  using T = typename C::T;
  using S = Shared<C>;
  using Item = typename Cta<C>::Item;
  static constexpr int tiles = C::dhv_panels / tile_panels;
  using Tile = StateTile<T, C::tile>;
  using Tiles = Tile[tiles];

  const Cta<C>& cta;

  __device__ __forceinline__ void carry() const {
    const Lane lane;
    unsigned chunks = 0;  // before this one, of all items
    cta.each_item([&](const Item& it) {
      Tiles dC;
      start(it, lane, dC);
      unsigned unit = cta.unit_of(it, it.high - 1);
#pragma unroll 1
      for (int left = it.high - it.low; left > 0; --left, ++chunks, unit -= cta.call.dims.heads) {
        publish(lane, dC, chunks);
        float2 product{0, 0};
        // Nobody reads what the segment's first chunk would make of dC.
        if (left > 1)
          add(lane, dC, unit, chunks, product);
        else
          only_multiply(lane, dC, chunks, product);
        store_through(unit, it.row / tile_rows, product.x + product.y);
      }
    });
  }

 private:
  __device__ __forceinline__ void arrive(const Lane& lane, unsigned barrier) const {
    if (arch::arrives(lane.lane == 0)) arch::arrive(barrier);
  }
  template <Panels P>
  __device__ __forceinline__ unsigned take(unsigned panel_number) const {
    const auto ring = RingOf<P>::at(panel_number);
    arch::wait(cta.barriers().template ring_full<P>(ring.slot), ring.phase);
    return S::template slot<P>(cta.memory, ring.slot);
  }
  template <Panels P>
  __device__ __forceinline__ void give_back(const Lane& lane, unsigned panel_number) const {
    arrive(lane, cta.barriers().template ring_empty<P>(RingOf<P>::at(panel_number).slot));
  }

  // Rounds dC for the math warpgroups, when they have read that of the chunk before.
  __device__ __forceinline__ void publish(const Lane& lane, Tiles& dC, unsigned chunks) const {
    arch::wait(cta.barriers().dC_empty(), (chunks & 1) ^ 1);
#pragma unroll
    for (int t = 0; t < tiles; ++t) dC[t].publish(cta.memory + S::dC + t * (tile_panels * panel_bytes), lane, 1);
    arch::writes_before_copies();
    __syncwarp();
    arrive(lane, cta.barriers().dC_full());
  }

  // Every thread makes the weight of one token, every other one writes those of two.
  __device__ __forceinline__ void make_weights() const {
    using Gates = typename S::Gates;
    const unsigned token = threadIdx.x % warpgroup_threads;
    const float2 u = arch::read_float2(cta.memory + Gates::u + 8 * token);
    const float own = exp_sum(u, arch::read_float2(cta.memory + Gates::inflow));
    std::uint32_t low;
    const std::uint32_t high = split<T>({own, __shfl_down_sync(0xFFFFFFFFU, own, 1)}, low);
    arch::named_wait(state_barrier, warpgroup_threads);  // the weights of the chunk before have been read
    if (token % 2 == 0)
      arch::write_int2(cta.memory + S::weights + 4 * token, {static_cast<int>(high), static_cast<int>(low)});
    arch::named_wait(state_barrier, warpgroup_threads);
  }

  // This thread's share of <C, dC> over a tile, which is before its decay.
  __device__ __forceinline__ void multiply_tile(const Lane& lane, Tile& dC, unsigned first_panel,
                                                float2& product) const {
#pragma unroll
    for (int p = 0; p < tile_panels; ++p) {
      dC.add_product(product, 0, p, take<panels_C>(first_panel + p), lane);
      __syncwarp();
      give_back<panels_C>(lane, first_panel + p);
    }
    arch::pin(product);  // otherwise its terms wait in registers
  }

  __device__ __forceinline__ void add(const Lane& lane, Tiles& dC, unsigned unit, unsigned chunks,
                                      float2& product) const {
    const Barriers<C> barriers = cta.barriers();
    const float decay = cta.call.gates.gbar[unit];
    const unsigned panels = chunks * C::dhv_panels;
    multiply_tile(lane, dC[0], panels, product);
    arch::wait(barriers.gates_full(), chunks & 1);
    make_weights();
    arrive(lane, barriers.gates_empty());
    const int buffer = static_cast<int>(chunks % 2);
    arch::wait(barriers.q_full(buffer), chunks / 2 & 1);
    const unsigned q = cta.memory + S::q + buffer * chunk_panel_bytes + lane.transposed_row();
    unsigned weights = cta.memory + S::weights;
    const auto weight = [&](int t) { return WeightPair(arch::read_words(weights + 4 * t)); };
    float nothing[1][2];
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      const unsigned first = panels + t * tile_panels, dh = take<panels_dh>(first);
      take<panels_dh>(first + 1);  // in the slot behind it
      arch::forget(weights);       // otherwise those of the tile before are kept in registers
      dC[t].add(q, dh, lane, weight, nothing, [&] { dC[t].multiply_by(decay); });
      if (t + 1 < tiles) multiply_tile(lane, dC[t + 1], first + tile_panels, product);
      arch::products_wait<0>();
      dC[t].pin();
      __syncwarp();
#pragma unroll
      for (int p = 0; p < tile_panels; ++p) give_back<panels_dh>(lane, first + p);
    }
    arrive(lane, barriers.q_added(static_cast<int>(chunks % 2)));
  }

  __device__ __forceinline__ void only_multiply(const Lane& lane, Tiles& dC, unsigned chunks, float2& product) const {
    const Barriers<C> barriers = cta.barriers();
    const unsigned panels = chunks * C::dhv_panels;
    arch::wait(barriers.gates_full(), chunks & 1);
    arrive(lane, barriers.gates_empty());
#pragma unroll
    for (int t = 0; t < tiles; ++t) multiply_tile(lane, dC[t], panels + t * tile_panels, product);
#pragma unroll 1
    for (int t = 0; t < C::dhv_panels; ++t) {
      take<panels_dh>(panels + t);
      give_back<panels_dh>(lane, panels + t);
    }
    arrive(lane, barriers.q_added(static_cast<int>(chunks % 2)));
  }

  // gbar <C at the start of the chunk, dC at its end>: see gates/grad_gates.cu.
  __device__ __forceinline__ void store_through(unsigned unit, int tile, float product) const {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xFFFFFFFFU, product, offset);
    const Lane lane = Lane::again();
    const int part = tile * warpgroup_warps + lane.warp;
    if (lane.lane == 0)
      cta.call.sums.through[static_cast<std::int64_t>(unit) * cta.call.sums.through_parts + part] =
          static_cast<double>(cta.call.gates.gbar[unit]) * static_cast<double>(product);
  }

  // dC after the segment's last token: as grad_segment_scan leaves it, or the gradient of the last state.
  __device__ __forceinline__ void start(const Item& it, const Lane& lane, Tiles& dC) const {
#pragma unroll
    for (int t = 0; t < tiles; ++t) dC[t].clear(0);
    const Dims& dims = cta.call.dims;
    const StridedState& last = cta.call.carried.dC_last;
    const float* from = nullptr;
    std::int64_t row_stride = dims.padded_dhv();
    if (C::packed ? it.high < it.chunks : dims.segments > 1) {
      from = cta.call.stored.segment_C + piece(it) * dims.dqk * dims.padded_dhv();
    } else if (last.data != nullptr) {
      from = static_cast<const float*>(last.data) + it.sequence * last.sequence + it.head * last.head;
      row_stride = last.row;
    }
    if (from == nullptr) return;
#pragma unroll
    for (int t = 0; t < tiles; ++t)
      dC[t].each(lane, [&](int r, int c, float& value, float& next) {
        const int row = it.row + r, column = t * tile_columns + c;
        if (row >= dims.dqk) return;
        if (column < dims.dhv) value = from[row * row_stride + column];
        if (column + 1 < dims.dhv) next = from[row * row_stride + column + 1];
      });
  }
  // The place of the state that a segment starts from.
  __device__ __forceinline__ std::int64_t piece(const Item& it) const {
    const Dims& dims = cta.call.dims;
    if constexpr (C::packed)
      return dims.boundary(it.start, it.segment, it.head);
    else
      return (it.sequence * dims.heads + it.head) * dims.segments * dims.pieces + (it.high - 1) / dims.chunks_per_piece;
  }
};

}  // namespace tfla::cuda::sm90::grad_qk_reverse
