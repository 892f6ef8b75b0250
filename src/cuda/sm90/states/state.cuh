// Stage `states` and its reverse-time twin on Hopper: the state.
#pragma once

#include "cuda/sm90/states/shared.cuh"

namespace tfla::cuda::sm90::states {

template <class T, Time Direction, Pass Which, int M, int Columns, bool Packed>
struct Carrier : Block<T, Direction, Which, M, Columns, Packed> {
  using Base = Block<T, Direction, Which, M, Columns, Packed>;
  using Base::adds;
  using Base::blocks_per_chunk;
  using Base::call;
  using Base::each_item;
  using Base::empty;
  using Base::full;
  using Base::gates;
  using Base::half;
  using Base::lifted;
  using Base::N;
  using Base::proper;
  using Base::reverse;
  using Base::shape;
  using Base::space;
  using Base::tile_of;
  using Base::warpgroups;
  using typename Base::Item;
  using typename Base::Space;
  using typename Base::Tile;

  __device__ void carry(int warpgroup) const {
    const Lane at;
    Ring<Space::slots> ring;
    unsigned turn = 0, loads = 0;  // loads: parity of what came into each buffer
    unsigned turns = 0;            // parity of states (float16)
    const auto scale = static_cast<float>(call.rules.scale);
    each_item([&](const Item& it) {
      const int column = it.column + warpgroup * N;
      Tile tile;
      float n[M][2];
      float lift = 1;  // of both (float16)
      start(it, column, at, tile, n);
      int k = 0;
      for (BlockWalk<Direction, Item> walk(it, blocks_per_chunk()); walk.more(); walk.next(), ring.advance()) {
        const bool enters = walk.enters_chunk();
        const std::int64_t unit = (it.first_number + walk.chunk) * call.dims.heads + it.head;
        if (proper && enters) {
          float state_lift = 1;  // of the rounded state besides
          if constexpr (lifted) {
            state_lift = scale16_of_state(largest_of_warps<4 * warpgroups>(tile.largest(), space + Space::largest, turns,
                                                                        4 * warpgroup + at.warp, 1),
                                       lift);
            turns ^= 1;
            if (warpgroup == 0 && at.warp == 0 && at.lane == 0)
              (reverse ? call.stored.inverse_scale_dC : call.stored.inverse_scale_C)[unit * tiles() + tile_of(it)] =
                  inverse_power(lift) * inverse_power(state_lift);
          }
          if (reverse) {
            await_c(k % 2, loads);
            store_through(unit, it, warpgroup, at, tile.product_with(half(k % 2, warpgroup), at), lift);
            tile.publish(half(k % 2, warpgroup), at, state_lift);
          } else {
            arch::wait(space + Space::drained, turn ^ 1);
            turn ^= 1;
            tile.publish(half(0, warpgroup), at, state_lift);
          }
          arch::writes_before_copies();
          __syncwarp();
          if (arch::arrives(at.lane == 0)) arch::arrive(space + Space::staged + 8 * (k % Space::buffers));
          if (column == 0) store_n(unit, it, at, n, lift);
          ++k;
        }
        if (!adds(it, walk.chunk)) break;
        arch::wait(full(ring.slot), ring.phase);
        const unsigned weights = gates(ring.slot);
        const auto weight = [&](int t) {
          const float2 w = arch::read_float2(weights + 4 * t);
          if (!reverse) return w;
          const float2 inverse = arch::read_float2(weights + 4 * (block_tokens + t));
          return float2{scale * w.x * inverse.x, scale * w.y * inverse.y};
        };
        float change = 1;
        if constexpr (lifted) {
          const float before = lift;
          lift = scale16_of_weights(at.pair, weight);
          change = lift * inverse_power(before);
        }
        if (enters || (lifted && change != 1)) {
          float decay = enters ? arch::read_float(weights + 4 * 2 * block_tokens) : 1.0F;
          if (lifted) decay *= change;
          tile.scale(decay);
#pragma unroll
          for (int m = 0; m < M; ++m) n[m][0] *= decay, n[m][1] *= decay;
        }
        const unsigned slot = space + ring.slot * Space::slot_bytes;
        tile.add(
            slot + at.transposed_row(), slot + Space::x_bytes + warpgroup * Space::y_bytes, at,
            [&](int t) {
              float2 w = weight(t);
              if (lifted) w = {w.x * lift, w.y * lift};
              return w;
            },
            n, [] {});
        arch::products_wait<0>();
        tile.hold();
        __syncwarp();  // all lanes have read keys and gates
        if (arch::arrives(at.lane == 0)) arch::arrive(empty(ring.slot));
      }
      if constexpr (lifted) tile.scale(inverse_power(lift));
      finish(it, column, at, tile, n, lift);
    });
  }

 private:
  __device__ std::int64_t tiles() const { return static_cast<std::int64_t>(shape.row_tiles) * shape.column_tiles; }

  __device__ void await_c(int buffer, unsigned& loads) const {
    arch::wait(space + Space::loaded + 8 * buffer, loads >> buffer & 1);
    loads ^= 1U << buffer;
  }

  __device__ const StridedState& from_C() const { return reverse ? call.carried.dC_last : call.carried.C0; }

  __device__ const StridedState& to_C() const { return reverse ? call.carried.dC0 : call.carried.C_last; }

  // Where a segment's state begins, and where the total of a piece goes.
  __device__ std::int64_t piece(const Item& it) const {
    if constexpr (Packed) return call.dims.boundary(it.start, proper == reverse ? it.segment : it.segment - 1, it.head);
    const int index = !proper   ? it.segment
                      : reverse ? (it.high - 1) / call.dims.chunks_per_piece
                                : it.segment * call.dims.pieces;
    return (it.sequence * call.dims.heads + it.head) * call.dims.segments * call.dims.pieces + index;
  }
  __device__ float* segment_state(const Item& it) const {
    return call.stored.segment_C + piece(it) * call.dims.dqk * call.dims.padded_dhv();
  }
  __device__ float* segment_norm(const Item& it) const {
    return static_cast<float*>(call.stored.segment_n) + piece(it) * call.dims.dqk;
  }

  // Element-wise between the tile and float32 in global memory.
  template <class Move>
  __device__ void each_inside(const Item& it, int column, const Lane& at, Tile& tile, const Move& move) const {
    tile.each(at, [&](int r, int c, float& value, float& next) {
      if (it.row + r >= call.dims.dqk) return;
      if (column + c < call.dims.dhv) move(it.row + r, column + c, value);
      if (column + c + 1 < call.dims.dhv) move(it.row + r, column + c + 1, next);
    });
  }

  // Pairs of the tile and their place in a state of our own, whose rows are padded: dhv is a multiple of eight.
  template <class Move>
  __device__ void each_pair(const Item& it, int column, const Lane& at, Tile& tile, const Move& move) const {
    tile.each(at, [&](int r, int c, float& value, float& next) {
      if (it.row + r < call.dims.dqk && column + c < call.dims.dhv)
        move(static_cast<std::int64_t>(it.row + r) * call.dims.padded_dhv() + column + c, value, next);
    });
  }

  // The rows of n that this thread's quad holds parts of.
  template <class Read>
  __device__ void read_n(const Item& it, const Lane& at, float (&n)[M][2], const Read& read) const {
    if (at.pair != 0) return;  // one lane has it all, the others of the quad begin at zero
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = it.row + 64 * m + at.row + 8 * h;
        if (row < call.dims.dqk) n[m][h] = read(row);
      }
  }

  template <class Write>
  __device__ void write_n(const Item& it, const Lane& at, const float (&n)[M][2], float lift,
                          const Write& write) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = it.row + 64 * m + at.row + 8 * h;
        float sum = reverse ? 0.0F : over_row(n[m][h]);  // dn is zero where these kernels are used
        if (lifted) sum *= inverse_power(lift);
        if (at.pair == 0 && row < call.dims.dqk) write(row, sum);
      }
  }

  __device__ void start(const Item& it, int column, const Lane& at, Tile& tile, float (&n)[M][2]) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      n[m][0] = n[m][1] = 0;
#pragma unroll
      for (float& x : tile.c[m]) x = 0;
    }
    if (!proper) return;
    if (Packed ? (reverse ? it.high < it.chunks : it.segment > 0) : call.dims.segments > 1) {
      const float* from = segment_state(it);
      each_pair(it, column, at, tile, [&](std::int64_t place, float& value, float& next) {
        const float2 pair = *reinterpret_cast<const float2*>(from + place);
        value = pair.x;
        next = pair.y;
      });
      const float* from_n = segment_norm(it);
      read_n(it, at, n, [&](int r) { return from_n[r]; });
      return;
    }
    const auto read = [&](const StridedState& rows, int r, int c) {
      return static_cast<const float*>(rows.data)[it.sequence * rows.sequence + it.head * rows.head + r * rows.row + c];
    };
    if (from_C().data != nullptr)
      each_inside(it, column, at, tile, [&](int r, int c, float& value) { value = read(from_C(), r, c); });
    if (!reverse && call.carried.n0.data != nullptr)
      read_n(it, at, n, [&](int r) { return read(call.carried.n0, 0, r); });
  }

  __device__ void store_n(std::int64_t unit, const Item& it, const Lane& at, float (&n)[M][2], float lift) const {
    float* to = (reverse ? call.stored.dn : static_cast<float*>(call.stored.n)) + unit * call.dims.dqk;
    write_n(it, at, n, lift, [&](int r, float value) { to[r] = value; });
  }

  // gbar <C at the start of the chunk, dC at its end>: see portable/gate_gradients.cu.
  __device__ void store_through(std::int64_t unit, const Item& it, int warpgroup, const Lane& at, float with_own,
                                float lift) const {
    if constexpr (lifted) with_own *= inverse_power(lift) * call.stored.inverse_scale_C[unit * tiles() + tile_of(it)];
    double product = static_cast<double>(call.gates.gbar[unit]) * static_cast<double>(with_own);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xFFFFFFFFU, product, offset);
    const int part = (tile_of(it) * warpgroups + warpgroup) * 4 + at.warp;
    if (at.lane == 0) call.sums.through[unit * call.sums.through_parts + part] = product;
  }

  __device__ void finish(const Item& it, int column, const Lane& at, Tile& tile, float (&n)[M][2], float lift) const {
    if (!proper) {
      float* to = segment_state(it);
      each_pair(it, column, at, tile, [&](std::int64_t place, float value, float next) {
        *reinterpret_cast<float2*>(to + place) = {value, next};
      });
      if (column != 0) return;
      float* to_n = segment_norm(it);
      write_n(it, at, n, lift, [&](int r, float value) { to_n[r] = value; });
      return;
    }
    if (reverse ? it.segment != 0 : it.high != it.chunks) return;
    const auto write = [&](const StridedState& rows, int r, int c, float value) {
      static_cast<float*>(rows.data)[it.sequence * rows.sequence + it.head * rows.head + r * rows.row + c] = value;
    };
    if (to_C().data != nullptr)
      each_inside(it, column, at, tile, [&](int r, int c, float& value) { write(to_C(), r, c, value); });
    const StridedState& to_n = reverse ? call.carried.dn0 : call.carried.n_last;
    if (column == 0 && to_n.data != nullptr)
      write_n(it, at, n, lift, [&](int r, float value) { write(to_n, 0, r, value); });
  }
};

}  // namespace tfla::cuda::sm90::states
