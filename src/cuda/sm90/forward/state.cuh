// Stages `states` and `outputs` in one kernel on Hopper: the state.
#pragma once

#include "cuda/sm90/forward/shared.cuh"

namespace tfla::cuda::sm90::forward {

template <class T, int M, int N, bool Normalized, bool Keep, bool Packed, Time Direction, Half Dqk>
struct Carrier : Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk> {
  using Base = Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk>;
  using Base::at;
  using Base::beside;
  using Base::call;
  using Base::each_item;
  using Base::first;
  using Base::is_fresh;
  using Base::is_kept;
  using Base::is_last_wanted;
  using Base::kept_unit;
  using Base::lifted;
  using Base::maps;
  using Base::reverse;
  using Base::shape;
  using Base::skips_fresh;
  using Base::space;
  using Base::step;
  using typename Base::Item;
  using typename Base::KeySlots;
  using typename Base::Slots;
  using typename Base::Space;
  using typename Base::Tile;

  static constexpr int own = Space::part_panels;  // 64-row panels of the state that this warpgroup has

  template <int Which>
  __device__ void carry() const {
    const Lane lane;
    Slots ring;
    KeySlots k(Which);
    unsigned turn = 0;      // parity of the block: whose outputs it goes to
    unsigned released = 0;  // parity of the states handed over: the phase of their buffer
    each_item([&](const Item& it) {
      Tile tile;
      float n[own][2];
      float lift = 1;  // of both (float16)
      start<Which>(it, lane, tile, n);
      float row_n[row_turns];
      int2 n_terms{};  // of float16 they are made when their lift is known
      const auto gather_n = [&] {
        sum_rows(n, row_n);
        if constexpr (beside && !lifted) n_terms = terms_of(row_n[0]);
      };
      if (hands_n) gather_n();
      const int first_kept = Space::wide && Keep ? kept_unit(it, 0) : 0;
#pragma unroll 1
      for (int block = first(it); (reverse ? block >= it.low : block < it.high);
           block += step, k.advance(Space::parts), ring.advance(), turn ^= 1) {
        if (!skips_fresh || !is_fresh(it, block)) {
          const unsigned parity = skips_fresh ? released : Space::slots == 2 ? ring.slot : turn;
          float2 lifts{1, 1};  // of the rounded C and n besides
          if constexpr (lifted) lifts = lifts_of<Which>(tile, n, lift, parity, lane);
          arch::wait(at(Space::c_empty), parity ^ 1);
          if (Space::wide && Keep) {  // its last copy has been read by the store
            if (here(lane).lane == 0) arch::wait_stores_read<0>();
            __syncwarp();
          }
          const int reader = Space::outputs == 2 ? static_cast<int>(turn) : 0;
          if constexpr (beside) {
            if constexpr (lifted) n_terms = terms_of(row_n[0] * lifts.y);
            publish_beside(lane, n_terms);
            tile.publish_groups(at(Space::state), lane, lifts.x);
          } else {
            tile.publish(at(Space::state) + Which * Space::part_bytes,
                         lifted && Space::wide ? Lane::again() : here(lane), lifts.x, M * panel_bytes);
            if (hands_n) publish_n(reader, Which, lane, row_n, lifts.y);
          }
          if (lifted && Which == 0 && lane.warp == 0 && lane.lane == 0)
            arch::write_float2(at(Space::lifts, reader), {inverse_power(lift) * inverse_power(lifts.x),
                                                          inverse_power(lift) * inverse_power(lifts.y)});
          arch::writes_before_copies();
          __syncwarp();
          if (arch::arrives(here(lane).lane == 0)) arch::arrive(at(Space::c_full, reader));
          if (Space::wide && Keep && is_kept(it, block))
            keep<Which>(first_kept + (block >> shape.kept_shift) * call.dims.heads, it.tile, here(lane), n);
          released ^= 1;
        }
        arch::wait(at(Space::k_full, k.slot), k.phase);
        arch::wait(at(Space::v_full, ring.slot), ring.phase);
        if (!is_last_wanted(it, block)) {  // both are filled again only when all their readers have said so
          if (arch::arrives(here(lane).lane == 0)) {
            arch::arrive(at(Space::k_empty, k.slot));
            arch::arrive(at(Space::v_empty, ring.slot));
          }
          continue;
        }
        const unsigned gates = at(Space::gates, ring.slot, Space::gate_bytes);
        float decay = arch::read_float(gates + Space::decay);
        const auto weight = [&](int t) { return arch::read_float2(gates + Space::abar + 4 * t); };
        if constexpr (lifted) {
          const float before = lift;
          lift = scale16_of_weights(lane.pair, weight);
          decay *= lift * inverse_power(before);
        }
        tile.add(
            at(Space::k, k.slot, Space::part_bytes) + here(lane).transposed_row(),
            at(Space::v, ring.slot, Space::v_bytes), lane,
            [&](int t) {
              float2 w = weight(t);
              if (lifted) w = {w.x * lift, w.y * lift};
              return w;
            },
            n,
            [&] {
              tile.scale(decay);
#pragma unroll
              for (int m = 0; m < own; ++m) {
                n[m][0] *= decay;
                n[m][1] *= decay;
              }
            });
        __syncwarp();  // all lanes have read K and the gates
        if (arch::arrives(here(lane).lane == 0)) arch::arrive(at(Space::k_empty, k.slot));
        if (hands_n) gather_n();  // meanwhile
        arch::products_wait<0>();
        tile.hold();
        if (arch::arrives(here(lane).lane == 0)) arch::arrive(at(Space::v_empty, ring.slot));
      }
      if constexpr (lifted) {
        tile.scale(inverse_power(lift));
#pragma unroll
        for (int m = 0; m < own; ++m) {
          n[m][0] *= inverse_power(lift);
          n[m][1] *= inverse_power(lift);
        }
      }
      finish<Which>(Base::lean || Base::ahead ? again(it) : it, lane, tile, n);
    });
    if (Space::wide && Keep && lane.lane == 0) arch::wait_stores<0>();
  }

 private:
  // Where all rows of dqk above 128 are in registers, there are none for what follows from the thread's number. Not
  // where keys are weighted in float32, which leaves more: 0.741 ms instead of 0.802 (8 heads of 256/512, without
  // normalizer, on two machines).
  __device__ __forceinline__ static Lane here(const Lane& lane) {
    return Space::lean && Base::pairs ? Lane::again() : lane;
  }

  // An item worked out anew: what the loop over its blocks does not need is not kept in registers.
  __device__ __forceinline__ Item again(const Item& it) const {
    int unit = static_cast<int>(it.unit);
    arch::forget(unit);
    return Item(call, shape, static_cast<unsigned>(unit));
  }

  // What C and n are multiplied by to be rounded. The sum over a quad is n: of its lanes, at most four times the
  // largest.
  template <int Which>
  __device__ __forceinline__ float2 lifts_of(const Tile& tile, const float (&n)[own][2], float lift, unsigned turn,
                                             const Lane& lane) const {
    constexpr int warps = 4 * Space::carriers;
    const auto of_warps = [&](auto largest) {
      return largest_of_warps<warps>(largest, at(Space::largest), turn, 4 * Which + lane.warp, Base::state_barrier);
    };
    if constexpr (Normalized) {
      float largest_n = 0;
#pragma unroll
      for (int m = 0; m < own; ++m) largest_n = fmaxf(largest_n, fmaxf(fabsf(n[m][0]), fabsf(n[m][1])));
      const float2 largest = of_warps(float2{tile.largest(), largest_n});
      return {scale16_of_state(largest.x, lift), scale16_of_state(largest.y, lift, top_of_norms)};
    } else {
      return {scale16_of_state(of_warps(tile.largest()), lift), 1};
    }
  }

  // The lanes of a quad have parts of the sums of rows. They exchange them until each has one row, or with more of them
  // one of every four; with fewer, two lanes have the same.
  static constexpr bool hands_n = Normalized || (Keep && !Space::wide && !reverse);
  static constexpr int row_turns = own > 1 ? own / 2 : 1;
  __device__ __forceinline__ void sum_rows(const float (&n)[own][2], float (&rows)[row_turns]) const {
    const unsigned thread = threadIdx.x;
    const bool odd = (thread & 1) != 0, late = (thread & 2) != 0;
    const auto swap = [](float x, int with) { return __shfl_xor_sync(0xFFFFFFFFU, x, with); };
#pragma unroll
    for (int turn = 0; turn < row_turns; ++turn) {
      const float* early_part = n[own > 1 ? 2 * turn : 0];
      const float* late_part = n[own > 1 ? 2 * turn + 1 : 0];
      float both[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        both[h] = late ? late_part[h] : early_part[h];
        if (own > 1) both[h] += swap(late ? early_part[h] : late_part[h], 2);
      }
      rows[turn] = (odd ? both[1] : both[0]) + swap(odd ? both[0] : both[1], 1);
      if (own == 1) rows[turn] += swap(rows[turn], 2);
    }
  }

  // Three 16-bit numbers that add up to n. In the order in which the lanes of a product read it: rows 2 i, 2 i + 1,
  // 2 i + 8, 2 i + 9 of every 16; or along rows of 64, swizzled.
  __device__ __forceinline__ void publish_n(int reader, int which, const Lane& lane, const float (&rows)[row_turns],
                                            float lift) const {
    const Lane now = Base::lean || Keep ? Lane::again() : lane;  // no register is left for the address
    const bool late = (now.lane & 2) != 0;
    const int h = now.lane & 1, k = now.lane / 4, warp = now.warp;
    unsigned to = at(Space::n, reader, Space::n_bytes);
    if (Base::lean || Keep) arch::forget(to);
    to = to + which * (Space::n_panel * own) + (own > 1 && late ? Space::n_panel : 0);
    to = Space::n_rows ? to + (2 * warp + h) * 16 + k * 2 : to + warp * 32 + k / 2 * 8 + k % 2 * 2 + h * 4;
#pragma unroll
    for (int turn = 0; turn < row_turns; ++turn) {
      float rest = rows[turn];
      if (lifted) rest *= lift;
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const unsigned short bits = to_bits<T>(rest);
        arch::write_half_word((Space::n_rows ? to ^ part * 16 : to) + 2 * turn * Space::n_panel + part * Space::n_part,
                              bits);
        rest -= from_bits<T>(bits);
      }
    }
  }

  // The same as three columns behind those of C.
  __device__ __forceinline__ static int2 terms_of(float rest) {
    unsigned terms[3];
#pragma unroll
    for (unsigned& bits : terms) {
      bits = to_bits<T>(rest);
      rest -= from_bits<T>(static_cast<unsigned short>(bits));
    }
    return {static_cast<int>(terms[0] | terms[1] << 16), static_cast<int>(terms[2])};
  }
  __device__ __forceinline__ void publish_beside(const Lane& lane, int2 terms) const {
    const int row = 16 * lane.warp + 8 * (lane.lane & 1) + lane.lane / 4 + (own > 1 ? 32 * (lane.lane & 2) : 0);
    arch::write_int2(at(Space::n - Space::group_bytes) + 16 * row, terms);
  }

  // Of a wide state each warp sends the 16 rows of every panel that it has published itself. Otherwise a warp of its
  // own sends all: one warpgroup has more to do than two.
  template <int Which>
  __device__ __forceinline__ void keep(int unit, int column_tile, const Lane& lane, const float (&n)[own][2]) const {
    if (lane.lane == 0) {
#pragma unroll
      for (int m = 0; m < own; ++m)
#pragma unroll
        for (int p = 0; p < N / 64; ++p)
          arch::store_box(at(Space::state) + (p * M + Which * own + m) * panel_bytes + lane.warp * (16 * 128),
                          &maps.states, column_tile * N + p * panel, 64 * (Which * own + m) + 16 * lane.warp, unit);
      arch::commit_stores();
    }
    if (!reverse && column_tile == 0)
      write_n<Which>(static_cast<float*>(call.stored.n) + static_cast<std::int64_t>(unit) * call.dims.dqk, lane, n);
  }

  template <int Which>
  __device__ __forceinline__ void write_n(float* to, const Lane& lane, const float (&n)[own][2]) const {
#pragma unroll
    for (int m = 0; m < own; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = reverse ? 0.0F : over_row(n[m][h]);  // dn is zero where these kernels are used
        const int row = 64 * (Which * own + m) + lane.row + 8 * h;
        if (lane.pair == 0 && row < call.dims.dqk) to[row] = sum;
      }
  }

  template <int Which, class Move>
  __device__ void each_inside(const Item& it, const Lane& lane, Tile& tile, const Move& move) const {
    tile.each(lane, [&](int r, int c, float& value, float& next) {
      r += Which * 64 * own;
      if (r >= call.dims.dqk) return;
      if (it.tile * N + c < call.dims.dhv) move(r, it.tile * N + c, value);
      if (it.tile * N + c + 1 < call.dims.dhv) move(r, it.tile * N + c + 1, next);
    });
  }

  // Where segments begin with what those before add up to.
  __device__ __forceinline__ bool starts_inside(const Item& it) const {
    if constexpr (Packed) return reverse ? it.high < it.chunks : it.segment > 0;
    return call.dims.segments > 1;
  }
  __device__ __forceinline__ std::int64_t segment_start(const Item& it) const {
    if constexpr (Packed)
      return call.dims.boundary(it.start, reverse ? it.segment : it.segment - 1, it.head);
    else if constexpr (reverse)  // the place of its last piece
      return (static_cast<std::int64_t>(it.sequence) * call.dims.heads + it.head) * call.dims.segments *
                 call.dims.pieces +
             (it.high - 1) / call.dims.chunks_per_piece;
    else
      return ((static_cast<std::int64_t>(it.sequence) * call.dims.heads + it.head) * call.dims.segments + it.segment) *
             call.dims.pieces;
  }

  // From the totals of the segments before, or the initial state.
  template <int Which>
  __device__ void start(const Item& it, const Lane& lane, Tile& tile, float (&n)[own][2]) const {
#pragma unroll
    for (int m = 0; m < own; ++m) {
      n[m][0] = n[m][1] = 0;
#pragma unroll
      for (float& x : tile.c[m]) x = 0;
    }
    const float* C = static_cast<const float*>(call.carried.C0.data);
    const float* n0 = static_cast<const float*>(call.carried.n0.data);
    std::int64_t row = call.carried.C0.row;
    if (C != nullptr) {
      C += it.sequence * call.carried.C0.sequence + it.head * call.carried.C0.head;
      if (!reverse) n0 += it.sequence * call.carried.n0.sequence + it.head * call.carried.n0.head;
    }
    if (starts_inside(it)) {
      const std::int64_t unit = segment_start(it);
      C = call.stored.segment_C + unit * call.dims.dqk * call.dims.padded_dhv();
      n0 = static_cast<const float*>(call.stored.segment_n) + unit * call.dims.dqk;
      row = call.dims.padded_dhv();
    }
    if (C == nullptr) return;
    each_inside<Which>(it, lane, tile, [&](int r, int c, float& value) { value = C[r * row + c]; });
    if constexpr (!reverse) {
      if (lane.pair != 0) return;  // one lane of a quad has n, the others begin at zero
#pragma unroll
      for (int m = 0; m < own; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (const int row = 64 * (Which * own + m) + lane.row + 8 * h; row < call.dims.dqk) n[m][h] = n0[row];
    }
  }

  template <int Which>
  __device__ void finish(const Item& it, const Lane& lane, Tile& tile, const float (&n)[own][2]) const {
    if constexpr (reverse) {
      if (it.low != 0) return;
      if (it.tile == 0 && call.carried.n_last.data != nullptr) write_last_n<Which>(it, lane, n);
      if (call.carried.C_last.data == nullptr) return;
    } else {
      if (call.carried.C_last.data == nullptr || it.high != it.chunks) return;
    }
    float* C = static_cast<float*>(call.carried.C_last.data) + it.sequence * call.carried.C_last.sequence +
               it.head * call.carried.C_last.head;
    each_inside<Which>(it, lane, tile, [&](int r, int c, float& value) { C[r * call.carried.C_last.row + c] = value; });
    if constexpr (!reverse) {
      if (it.tile == 0) write_last_n<Which>(it, lane, n);
    }
  }

  template <int Which>
  __device__ __forceinline__ void write_last_n(const Item& it, const Lane& lane, const float (&n)[own][2]) const {
    write_n<Which>(static_cast<float*>(call.carried.n_last.data) + it.sequence * call.carried.n_last.sequence +
                       it.head * call.carried.n_last.head,
                   lane, n);
  }
};

}  // namespace tfla::cuda::sm90::forward
