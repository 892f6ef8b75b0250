// States on Hopper: the state.
#pragma once

#include "cuda/sm90/states/cta.cuh"

namespace tfla::cuda::sm90::states {

// The warpgroups that hold the state, each some of its columns, in registers over a whole segment. X and Y are keys and
// values, or in reverse time queries and dH:
//
//   C <- decay C + (weight X)^T Y,   n <- decay n + the sums of weight X
template <class C>
struct State {
  using T = typename C::T;
  using S = Shared<C>;
  using Item = typename Cta<C>::Item;
  using Walk = typename Cta<C>::Walk;
  using Slots = typename Cta<C>::Slots;
  using Tile = StateTile<T, C::tile>;
  static constexpr int M = C::row_panels;

  using N = float[M][2];
  // What a thread holds. References to variables of carry(), as in forward/state.cuh.
  struct Held {
    Tile& c;
    N& n;            // its share of the sums of rows
    float& scale16;  // of c and n (float16)
  };
  struct Parities {
    unsigned drained = 0;  // of the states that left
    unsigned loads = 0;    // of what came into each buffer
    unsigned scales = 0;   // of the states that were scaled (float16)
  };

  const Cta<C>& cta;
  int warpgroup;

  __device__ void carry() const {
    const Lane lane;
    Slots ring;
    Parities parity;
    const auto scale = static_cast<float>(cta.call.rules.scale);
    cta.each_item([&](const Item& it) {
      const int column = it.column + warpgroup * C::warpgroup_columns;
      Tile c;
      N n;
      float scale16 = 1;
      const Held held{c, n, scale16};
      start(it, column, lane, held);
      int k = 0;
      for (Walk walk(it, cta.blocks_per_chunk()); walk.more(); walk.next(), ring.advance()) {
        const bool enters = walk.enters_chunk();
        const std::int64_t unit = (it.first_number + walk.chunk) * cta.call.dims.heads + it.head;
        if (C::makes_states && enters) {
          round_state(it, unit, k, lane, held, parity);
          if (column == 0) store_n(unit, it, lane, held);
          ++k;
        }
        if (!cta.adds(it, walk.chunk)) break;
        arch::wait(cta.shared.full(ring.slot), ring.phase);
        add(ring.slot, enters, scale, lane, held);
        if (arch::arrives(lane.lane == 0)) arch::arrive(cta.shared.empty(ring.slot));
      }
      if constexpr (C::scaled) held.c.multiply_by(inverse_power(held.scale16));
      finish(it, column, lane, held);
    });
  }

 private:
  // The state at the start of a chunk, in reverse time at its end, into shared memory. k: how many were before.
  __device__ __forceinline__ void round_state(const Item& it, std::int64_t unit, int k, const Lane& lane,
                                              const Held& held, Parities& parity) const {
    float scale16 = 1;  // of the rounded state, besides held.scale16
    if constexpr (C::scaled) {
      scale16 = scale16_of_state(
          largest_of_warps<warpgroup_warps * C::warpgroups>(held.c.largest(), cta.shared.largest(), parity.scales,
                                                            warpgroup_warps * warpgroup + lane.warp, state_barrier),
          held.scale16);
      parity.scales ^= 1;
      const auto& stored = cta.call.stored;
      if (warpgroup == 0 && lane.warp == 0 && lane.lane == 0)
        (C::reverse ? stored.inverse_scale_dC : stored.inverse_scale_C)[unit * tiles() + cta.tile_of(it)] =
            inverse_power(held.scale16) * inverse_power(scale16);
    }
    if (C::reverse) {
      await_c(k % 2, parity.loads);
      store_through(unit, it, lane, held.c.product_with(cta.shared.share(k % 2, warpgroup), lane), held.scale16);
      held.c.publish(cta.shared.share(k % 2, warpgroup), lane, scale16);
    } else {
      arch::wait(cta.shared.drained(), parity.drained ^ 1);
      parity.drained ^= 1;
      held.c.publish(cta.shared.share(0, warpgroup), lane, scale16);
    }
    arch::writes_before_copies();
    __syncwarp();
    if (arch::arrives(lane.lane == 0)) arch::arrive(cta.shared.staged(k % S::buffers));
  }

  // Adds the token block of a slot. enters: it is the first of its chunk. scale / den of queries is in their weights.
  __device__ __forceinline__ void add(int slot, bool enters, float scale, const Lane& lane, const Held& held) const {
    const unsigned gates = cta.shared.gates(slot);
    const auto weight = [&](int t) {
      const float2 w = arch::read_float2(gates + S::Gates::weight + 4 * t);
      if (!C::reverse) return w;
      const float2 inverse = arch::read_float2(gates + S::Gates::inverse + 4 * t);
      return float2{scale * w.x * inverse.x, scale * w.y * inverse.y};
    };
    float change = 1;
    if constexpr (C::scaled) {
      const float before = held.scale16;
      held.scale16 = scale16_of_weights(lane.pair, weight);
      change = held.scale16 * inverse_power(before);
    }
    if (enters || (C::scaled && change != 1)) {
      float decay = enters ? arch::read_float(gates + S::Gates::decay) : 1.0F;
      if (C::scaled) decay *= change;
      held.c.multiply_by(decay);
#pragma unroll
      for (int m = 0; m < M; ++m) held.n[m][0] *= decay, held.n[m][1] *= decay;
    }
    const unsigned x = cta.shared.x(slot);
    held.c.add(
        x + lane.transposed_row(), x + S::x_bytes + warpgroup * S::y_bytes, lane,
        [&](int t) {
          float2 w = weight(t);
          if (C::scaled) w = {w.x * held.scale16, w.y * held.scale16};
          return w;
        },
        held.n, [] {});
    arch::products_wait<0>();
    held.c.pin();
    __syncwarp();  // all lanes have read keys and gates
  }

  __device__ std::int64_t tiles() const {
    return static_cast<std::int64_t>(cta.work.row_tiles) * cta.work.column_tiles;
  }

  __device__ void await_c(int buffer, unsigned& loads) const {
    arch::wait(cta.shared.loaded(buffer), loads >> buffer & 1);
    loads ^= 1U << buffer;
  }

  __device__ const StridedState& from_C() const { return C::reverse ? cta.call.carried.dC_last : cta.call.carried.C0; }

  __device__ const StridedState& to_C() const { return C::reverse ? cta.call.carried.dC0 : cta.call.carried.C_last; }

  // The place of the state that a segment starts from, or of the total of a piece.
  __device__ std::int64_t piece(const Item& it) const {
    if constexpr (C::packed)
      return cta.call.dims.boundary(it.start, C::makes_states == C::reverse ? it.segment : it.segment - 1, it.head);
    const int index = !C::makes_states ? it.segment
                      : C::reverse     ? (it.high - 1) / cta.call.dims.chunks_per_piece
                                       : it.segment * cta.call.dims.pieces;
    return (it.sequence * cta.call.dims.heads + it.head) * cta.call.dims.segments * cta.call.dims.pieces + index;
  }
  __device__ float* segment_state(const Item& it) const {
    return cta.call.stored.segment_C + piece(it) * cta.call.dims.dqk * cta.call.dims.padded_dhv();
  }
  __device__ float* segment_norm(const Item& it) const {
    return static_cast<float*>(cta.call.stored.segment_n) + piece(it) * cta.call.dims.dqk;
  }

  // Element-wise between the tile and float32 in global memory.
  template <class Move>
  __device__ void each_inside(const Item& it, int column, const Lane& lane, Tile& c_tile, const Move& move) const {
    c_tile.each(lane, [&](int r, int c, float& value, float& next) {
      if (it.row + r >= cta.call.dims.dqk) return;
      if (column + c < cta.call.dims.dhv) move(it.row + r, column + c, value);
      if (column + c + 1 < cta.call.dims.dhv) move(it.row + r, column + c + 1, next);
    });
  }

  // The same by pairs, in scratch, whose rows are padded to a multiple of eight.
  template <class Move>
  __device__ void each_pair(const Item& it, int column, const Lane& lane, Tile& c_tile, const Move& move) const {
    c_tile.each(lane, [&](int r, int c, float& value, float& next) {
      if (it.row + r < cta.call.dims.dqk && column + c < cta.call.dims.dhv)
        move(static_cast<std::int64_t>(it.row + r) * cta.call.dims.padded_dhv() + column + c, value, next);
    });
  }

  // The rows of n that this thread's quad holds parts of.
  template <class Read>
  __device__ void read_n(const Item& it, const Lane& lane, N& n, const Read& read) const {
    if (lane.pair != 0) return;  // one lane of a quad has n, the others begin at zero
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = it.row + 64 * m + lane.row + 8 * h;
        if (row < cta.call.dims.dqk) n[m][h] = read(row);
      }
  }

  template <class Write>
  __device__ void write_n(const Item& it, const Lane& lane, const Held& held, const Write& write) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = it.row + 64 * m + lane.row + 8 * h;
        float sum = C::reverse ? 0.0F : over_row(held.n[m][h]);  // dn is zero where these kernels are used
        if (C::scaled) sum *= inverse_power(held.scale16);
        if (lane.pair == 0 && row < cta.call.dims.dqk) write(row, sum);
      }
  }

  __device__ void start(const Item& it, int column, const Lane& lane, const Held& held) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      held.n[m][0] = held.n[m][1] = 0;
      held.c.clear(m);
    }
    if (!C::makes_states) return;
    if (C::packed ? (C::reverse ? it.high < it.chunks : it.segment > 0) : cta.call.dims.segments > 1) {
      const float* from = segment_state(it);
      each_pair(it, column, lane, held.c, [&](std::int64_t place, float& value, float& next) {
        const float2 pair = *reinterpret_cast<const float2*>(from + place);
        value = pair.x;
        next = pair.y;
      });
      const float* from_n = segment_norm(it);
      read_n(it, lane, held.n, [&](int r) { return from_n[r]; });
      return;
    }
    const auto read = [&](const StridedState& state, int r, int c) {
      return static_cast<const float*>(
          state.data)[it.sequence * state.sequence + it.head * state.head + r * state.row + c];
    };
    if (from_C().data != nullptr)
      each_inside(it, column, lane, held.c, [&](int r, int c, float& value) { value = read(from_C(), r, c); });
    if (!C::reverse && cta.call.carried.n0.data != nullptr)
      read_n(it, lane, held.n, [&](int r) { return read(cta.call.carried.n0, 0, r); });
  }

  __device__ void store_n(std::int64_t unit, const Item& it, const Lane& lane, const Held& held) const {
    float* to = (C::reverse ? cta.call.stored.dn : static_cast<float*>(cta.call.stored.n)) + unit * cta.call.dims.dqk;
    write_n(it, lane, held, [&](int r, float value) { to[r] = value; });
  }

  // gbar <C at the start of the chunk, dC at its end>: see portable/grad_gates.cu.
  __device__ void store_through(std::int64_t unit, const Item& it, const Lane& lane, float product_with_c,
                                float scale16) const {
    if constexpr (C::scaled)
      product_with_c *= inverse_power(scale16) * cta.call.stored.inverse_scale_C[unit * tiles() + cta.tile_of(it)];
    double product = static_cast<double>(cta.call.gates.gbar[unit]) * static_cast<double>(product_with_c);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xFFFFFFFFU, product, offset);
    const int part = (cta.tile_of(it) * C::warpgroups + warpgroup) * warpgroup_warps + lane.warp;
    if (lane.lane == 0) cta.call.sums.through[unit * cta.call.sums.through_parts + part] = product;
  }

  __device__ void finish(const Item& it, int column, const Lane& lane, const Held& held) const {
    if (!C::makes_states) {
      float* to = segment_state(it);
      each_pair(it, column, lane, held.c, [&](std::int64_t place, float value, float next) {
        *reinterpret_cast<float2*>(to + place) = {value, next};
      });
      if (column != 0) return;
      float* to_n = segment_norm(it);
      write_n(it, lane, held, [&](int r, float value) { to_n[r] = value; });
      return;
    }
    if (C::reverse ? it.segment != 0 : it.high != it.chunks) return;
    const auto write = [&](const StridedState& state, int r, int c, float value) {
      static_cast<float*>(state.data)[it.sequence * state.sequence + it.head * state.head + r * state.row + c] = value;
    };
    if (to_C().data != nullptr)
      each_inside(it, column, lane, held.c, [&](int r, int c, float& value) { write(to_C(), r, c, value); });
    const StridedState& to_n = C::reverse ? cta.call.carried.dn0 : cta.call.carried.n_last;
    if (column == 0 && to_n.data != nullptr)
      write_n(it, lane, held, [&](int r, float value) { write(to_n, 0, r, value); });
  }
};

}  // namespace tfla::cuda::sm90::states
