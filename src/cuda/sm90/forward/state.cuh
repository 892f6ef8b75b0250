// Forward on Hopper: the state.
#pragma once

#include "cuda/arch/stream.cuh"
#include "cuda/sm90/forward/cta.cuh"
#include "cuda/sm90/forward/state_n.cuh"

namespace tfla::cuda::sm90::forward {

// One warpgroup, with part `Part` of the rows of C in registers. For every token block it rounds C and n into shared
// memory for the outputs, then adds the token block:
//
//   C <- decay C + (abar K)^T V,   n <- decay n + the sums of abar K
template <class C, int Part>
struct State {
  using T = typename C::T;
  using S = Shared<C>;
  using Item = typename Cta<C>::Item;
  using Slots = typename Cta<C>::Slots;
  using KeySlots = typename Cta<C>::KeySlots;

  static constexpr int panels = C::part_panels;  // of 64 rows
  using Tile = StateTile<T, C::tile>;
  using N = float[panels][2];
  using RowN = float[rows_of_lane<panels>];
  // What a thread holds. References to variables of carry(): as members of one struct the compiler orders them
  // otherwise in registers.
  struct Held {
    Tile& c;
    N& n;            // its share of the sums of rows
    float& scale16;  // of c and n (float16)
    RowN& row_n;     // sums of whole rows of n: see sum_rows
    int2& n_terms;   // row_n[0] in three terms. In float16 they are made when their scale16 is known
  };

  const Cta<C>& cta;

  __device__ void carry() const {
    const Lane lane;
    Slots ring;
    KeySlots k(Part);
    unsigned turn = 0;         // parity of the token block: which output warpgroup reads the state
    unsigned handed_over = 0;  // parity of the states handed over: the phase of their buffer
    cta.each_item([&](const Item& it) {
      Tile c;
      N n;
      float scale16 = 1;
      RowN row_n;
      int2 n_terms{};
      const Held held{c, n, scale16, row_n, n_terms};
      start(it, lane, held);
      gather_n(held);
      const int first_kept = C::state_keeps_states ? cta.kept_unit(it, 0) : 0;
#pragma unroll 1
      for (int block = cta.first(it); (C::reverse ? block >= it.low : block < it.high);
           block += cta.step, k.advance(C::parts), ring.advance(), turn ^= 1) {
        if (!C::skips_fresh || !cta.is_fresh(it, block)) {
          hand_over(C::skips_fresh ? handed_over : parity_of(ring, turn), reader_of(turn), lane, held);
          if (C::state_keeps_states && cta.is_kept(it, block))
            keep(first_kept + (block >> cta.work.kept_shift) * cta.call.dims.heads, it.tile, here(lane), held);
          handed_over ^= 1;
        }
        arch::wait(cta.shared.k_full(k.slot), k.phase);
        arch::wait(cta.shared.v_full(ring.slot), ring.phase);
        if constexpr (C::grad_qk)
          pass_checkpoint(arch::read_int(cta.shared.place(ring.slot) + PlaceOffsets::checkpoint), held);
        if (!cta.is_last_wanted(it, block)) {  // K and V are loaded again only when all their readers have arrived
          if (arch::arrives(here(lane).lane == 0)) {
            arch::arrive(cta.shared.k_empty(k.slot));
            arch::arrive(cta.shared.v_empty(ring.slot));
          }
          continue;
        }
        add(k, ring, lane, held);
      }
      undo_scale16(held);
      if constexpr (C::grad_qk) pass_last_checkpoint(again(it), held);
      finish(again(it), lane, held);
    });
    if (C::state_keeps_states && lane.lane == 0) arch::wait_stores<0>();
  }

 private:
  // Where a thread holds 128 numbers of the state, no register is left for what follows from its number. Not where keys
  // are weighted in float32, which leaves more: 0.741 ms instead of 0.802 (8 heads of 256/512, without normalizer, on
  // two H200).
  __device__ __forceinline__ static Lane here(const Lane& lane) {
    return C::large_dqk && C::paired_weights ? Lane::again() : lane;
  }

  // The item, computed anew where registers are short: what the loop over its token blocks does not need is not kept.
  __device__ __forceinline__ Item again(const Item& it) const {
    if constexpr (!C::few_registers && !C::factored) return it;
    int unit = static_cast<int>(it.unit);
    arch::forget(unit);
    return Item(cta.call, cta.work, static_cast<unsigned>(unit));
  }

  // The parity of the token block's number, and the output warpgroup that reads its state.
  __device__ __forceinline__ static unsigned parity_of(const Slots& ring, unsigned turn) {
    return S::slots == 2 ? ring.slot : turn;
  }
  __device__ __forceinline__ static int reader_of(unsigned turn) {
    return C::output_warpgroups == 2 ? static_cast<int>(turn) : 0;
  }

  __device__ __forceinline__ static void decay_by(float decay, const Held& held) {
    held.c.multiply_by(decay);
#pragma unroll
    for (int m = 0; m < panels; ++m) {
      held.n[m][0] *= decay;
      held.n[m][1] *= decay;
    }
  }

  __device__ __forceinline__ static void undo_scale16(const Held& held) {
    if constexpr (C::scaled) decay_by(inverse_power(held.scale16), held);
  }

  // Rounds C and n into shared memory. parity: of the buffer's phase; reader: the output warpgroup.
  __device__ __forceinline__ void hand_over(unsigned parity, int reader, const Lane& lane, const Held& held) const {
    float2 scales{1, 1};  // scale16 of the rounded C and n, besides held.scale16
    if constexpr (C::scaled) scales = scales_of(held, parity, lane);
    arch::wait(cta.shared.c_empty(), parity ^ 1);
    if (C::state_keeps_states) {  // the store of the last kept state has read the buffer
      if (here(lane).lane == 0) arch::wait_stores_read<0>();
      __syncwarp();
    }
    publish(reader, lane, scales, held);
    if (C::scaled && Part == 0 && lane.warp == 0 && lane.lane == 0)
      arch::write_float2(cta.shared.inverse_scales(reader), {inverse_power(held.scale16) * inverse_power(scales.x),
                                                             inverse_power(held.scale16) * inverse_power(scales.y)});
    arch::writes_before_copies();
    __syncwarp();
    if (arch::arrives(here(lane).lane == 0)) arch::arrive(cta.shared.c_full(reader));
  }

  __device__ __forceinline__ static Lane publish_lane(const Lane& lane) {
    return C::scaled && C::split_state ? Lane::again() : here(lane);
  }
  __device__ __forceinline__ void publish(int reader, const Lane& lane, float2 scales, const Held& held) const {
    if constexpr (C::n_in_state_product) {
      if constexpr (C::scaled) held.n_terms = terms_of<T>(held.row_n[0] * scales.y);
      publish_n_columns(lane, held.n_terms);
      held.c.publish_groups(cta.shared.state(), lane, scales.x);
    } else {
      held.c.publish(cta.shared.state() + Part * S::part_bytes, publish_lane(lane), scales.x,
                     C::dqk_panels * panel_bytes);
      if (C::hands_n) publish_n(reader, lane, held.row_n, scales.y);
    }
  }

  // Adds the token block of these slots.
  __device__ __forceinline__ void add(const KeySlots& k, const Slots& ring, const Lane& lane, const Held& held) const {
    const unsigned gates = cta.shared.gates(ring.slot);
    float decay = arch::read_float(gates + S::Gates::decay);
    const auto weight = [&](int t) { return arch::read_float2(gates + S::Gates::abar + 4 * t); };
    if constexpr (C::scaled) {
      const float before = held.scale16;
      held.scale16 = scale16_of_weights(lane.pair, weight);
      decay *= held.scale16 * inverse_power(before);
    }
    held.c.add(
        cta.shared.k(k.slot) + here(lane).transposed_row(), cta.shared.v(ring.slot), lane,
        [&](int t) {
          float2 w = weight(t);
          if (C::scaled) w = {w.x * held.scale16, w.y * held.scale16};
          return w;
        },
        held.n, [&] { decay_by(decay, held); });
    __syncwarp();  // all lanes have read K and the gates
    if (arch::arrives(here(lane).lane == 0)) arch::arrive(cta.shared.k_empty(k.slot));
    gather_n(held);  // while the products are in flight
    arch::products_wait<0>();
    held.c.pin();
    if (arch::arrives(here(lane).lane == 0)) arch::arrive(cta.shared.v_empty(ring.slot));
  }

  // The scale16 that C and n are rounded with. n is the sum over a quad: at most four times the largest of its lanes.
  __device__ __forceinline__ float2 scales_of(const Held& held, unsigned parity, const Lane& lane) const {
    const auto of_warps = [&](auto largest) {
      return largest_of_warps<4 * C::state_warpgroups>(largest, cta.shared.largest(), parity, 4 * Part + lane.warp,
                                                       state_barrier);
    };
    if constexpr (C::normalized) {
      float largest_n = 0;
#pragma unroll
      for (int m = 0; m < panels; ++m) largest_n = fmaxf(largest_n, fmaxf(fabsf(held.n[m][0]), fabsf(held.n[m][1])));
      const float2 largest = of_warps(float2{held.c.largest(), largest_n});
      return {scale16_of_state(largest.x, held.scale16), scale16_of_state(largest.y, held.scale16, top_of_norms)};
    } else {
      return {scale16_of_state(of_warps(held.c.largest()), held.scale16), 1};
    }
  }

  __device__ __forceinline__ void gather_n(const Held& held) const {
    if constexpr (C::hands_n) sum_rows<panels>(held.n, held.row_n);
    if constexpr (C::n_in_state_product && !C::scaled) held.n_terms = terms_of<T>(held.row_n[0]);
  }

  // n as three 16-bit terms that add up to it. Along rows of 64, swizzled, as wgmma reads them; or in the order in
  // which the lanes of mma.sync do: rows 2 i, 2 i + 1, 2 i + 8, 2 i + 9 of every 16.
  __device__ __forceinline__ void publish_n(int reader, const Lane& lane, const RowN& n, float scale16) const {
    const Lane now = C::few_state_registers ? Lane::again() : lane;
    const bool late = (now.lane & 2) != 0;
    const int h = now.lane & 1, k = now.lane / 4, warp = now.warp;
    unsigned to = cta.shared.n(reader);
    if (C::few_state_registers) arch::forget(to);
    to = to + Part * (S::n_panel * panels) + (panels > 1 && late ? S::n_panel : 0);
    to = C::n_is_wgmma_operand ? to + (2 * warp + h) * 16 + k * 2 : to + warp * 32 + k / 2 * 8 + k % 2 * 2 + h * 4;
#pragma unroll
    for (int turn = 0; turn < rows_of_lane<panels>; ++turn) {
      float rest = n[turn];
      if (C::scaled) rest *= scale16;
#pragma unroll
      for (int term = 0; term < 3; ++term) {
        const unsigned short bits = to_bits<T>(rest);
        arch::write_half_word((C::n_is_wgmma_operand ? to ^ term * 16 : to) + 2 * turn * S::n_panel + term * S::n_term,
                              bits);
        rest -= from_bits<T>(bits);
      }
    }
  }

  // The same as three columns behind those of C.
  __device__ __forceinline__ void publish_n_columns(const Lane& lane, int2 terms) const {
    const int row = 16 * lane.warp + 8 * (lane.lane & 1) + lane.lane / 4 + (panels > 1 ? 32 * (lane.lane & 2) : 0);
    arch::write_int2(cta.shared.n_columns() + 16 * row, terms);
  }

  // Each warp of a split state stores the 16 rows of every panel that it has published itself.
  __device__ __forceinline__ void keep(int unit, int column_tile, const Lane& lane, const Held& held) const {
    if (lane.lane == 0) {
#pragma unroll
      for (int m = 0; m < panels; ++m)
#pragma unroll
        for (int p = 0; p < C::columns / panel; ++p)
          arch::store_box(cta.shared.state() + (p * C::dqk_panels + Part * panels + m) * panel_bytes +
                              lane.warp * (16 * panel_row_bytes),
                          &cta.maps.states, column_tile * C::columns + p * panel,
                          64 * (Part * panels + m) + 16 * lane.warp, unit);
      arch::commit_stores();
    }
    if (!C::reverse && column_tile == 0)
      write_n(static_cast<float*>(cta.call.stored.n) + static_cast<std::int64_t>(unit) * cta.call.dims.dqk, lane,
              held.n);
  }

  __device__ __forceinline__ void write_n(float* to, const Lane& lane, const N& n) const {
#pragma unroll
    for (int m = 0; m < panels; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = C::reverse ? 0.0F : over_row(n[m][h]);  // dn is zero where these kernels are used
        const int row = 64 * (Part * panels + m) + lane.row + 8 * h;
        if (lane.pair == 0 && row < cta.call.dims.dqk) to[row] = sum;
      }
  }

  template <class Move>
  __device__ void each_inside(const Item& it, const Lane& lane, const Held& held, const Move& move) const {
    held.c.each(lane, [&](int r, int c, float& value, float& next) {
      r += Part * 64 * panels;
      if (r >= cta.call.dims.dqk) return;
      if (it.tile * C::columns + c < cta.call.dims.dhv) move(r, it.tile * C::columns + c, value);
      if (it.tile * C::columns + c + 1 < cta.call.dims.dhv) move(r, it.tile * C::columns + c + 1, next);
    });
  }

  // Whether an item starts from the totals of segments before it, and which of these totals.
  __device__ __forceinline__ bool starts_inside(const Item& it) const {
    if constexpr (C::packed) return C::reverse ? it.high < it.chunks : it.segment > 0;
    return cta.call.dims.segments > 1;
  }
  __device__ __forceinline__ std::int64_t segment_start(const Item& it) const {
    const Dims& dims = cta.call.dims;
    if constexpr (C::packed)
      return dims.boundary(it.start, C::reverse ? it.segment : it.segment - 1, it.head);
    else if constexpr (C::reverse)  // the place of its last piece
      return (static_cast<std::int64_t>(it.sequence) * dims.heads + it.head) * dims.segments * dims.pieces +
             (it.high - 1) / dims.chunks_per_piece;
    else
      return ((static_cast<std::int64_t>(it.sequence) * dims.heads + it.head) * dims.segments + it.segment) *
             dims.pieces;
  }

  // dQ and dK: C in 16 bits, as the threads hold it, is left at checkpoints, for <C, dC> there. The same threads of the
  // kernel in reverse time have the same numbers of dC.
  static constexpr int eights = panels * C::columns / 16;  // of a thread
  __device__ __forceinline__ void pass_checkpoint(int number, const Held& held) const {
    if (number < 0) return;
    auto* state = reinterpret_cast<uint4*>(cta.checkpoint_state(number)) + Part * (eights * warpgroup_threads) +
                  threadIdx.x % warpgroup_threads;
    const auto own = [&](int x) { return held.c.c[x / (C::columns / 16)] + x % (C::columns / 16) * 8; };
    if constexpr (C::reverse) {
      constexpr int at_once = 4;  // in flight
      float sum = 0;
#pragma unroll
      for (int first = 0; first < eights; first += at_once) {
        uint4 other[at_once];
#pragma unroll
        for (int x = 0; x < at_once; ++x) other[x] = arch::read_once(state + (first + x) * warpgroup_threads);
#pragma unroll
        for (int x = 0; x < at_once; ++x) sum += product_with(own(first + x), other[x]);
      }
      leave_product(number, sum);
    } else {
#pragma unroll
      for (int x = 0; x < eights; ++x) {
        const float* c = own(x);
        // Pairs in the other order: otherwise ptxas keeps those of `publish`, in registers that are not there.
        const auto pack = [&](int e) { return arch::pack(float2{c[e + 1], c[e]}, T{}); };
        arch::write_once(state + x * warpgroup_threads, {pack(0), pack(2), pack(4), pack(6)});
      }
    }
  }
  // The one at the end of a sequence, or in reverse time at its start.
  __device__ __forceinline__ void pass_last_checkpoint(const Item& it, const Held& held) const {
    const int block = C::reverse ? 0 : it.high;
    if ((C::reverse ? it.low == 0 : it.high == it.chunks) && cta.is_checkpoint(it, block))
      pass_checkpoint(cta.checkpoint(it, block), held);
  }
  __device__ __forceinline__ static float product_with(const float* c, const uint4& other) {
    const auto two = [&](int e, std::uint32_t pair) {
      const float2 x = arch::unpack(pair, T{});
      return fmaf(c[e], x.y, c[e + 1] * x.x);
    };
    return (two(0, other.x) + two(2, other.y)) + (two(4, other.z) + two(6, other.w));
  }
  // This thread's part of <C, dC>.
  __device__ __forceinline__ void leave_product(int checkpoint, float sum) const {
#pragma unroll
    for (int offset = warp_threads / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, offset);
    const Lane here = Lane::again();
    if (here.lane != 0) return;
    constexpr int warps = C::state_warpgroups * hopper::warps;
    cta.call.sums.through[static_cast<std::int64_t>(checkpoint) * warps + Part * hopper::warps + here.warp] = sum;
  }

  // From the totals of the segments before, or the initial state, or zero.
  __device__ void start(const Item& it, const Lane& lane, const Held& held) const {
    const Call<float>& call = cta.call;
#pragma unroll
    for (int m = 0; m < panels; ++m) {
      held.n[m][0] = held.n[m][1] = 0;
      held.c.clear(m);
    }
    const float* C0 = static_cast<const float*>(call.carried.C0.data);
    const float* n0 = static_cast<const float*>(call.carried.n0.data);
    std::int64_t row = call.carried.C0.row;
    if (C0 != nullptr) {
      C0 += it.sequence * call.carried.C0.sequence + it.head * call.carried.C0.head;
      if (!C::reverse && !C::grad_qk) n0 += it.sequence * call.carried.n0.sequence + it.head * call.carried.n0.head;
    }
    if (starts_inside(it)) {
      const std::int64_t unit = segment_start(it);
      C0 = call.stored.segment_C + unit * call.dims.dqk * call.dims.padded_dhv();
      n0 = static_cast<const float*>(call.stored.segment_n) + unit * call.dims.dqk;
      row = C::grad_qk ? call.dims.dqk : call.dims.padded_dhv();  // both are multiples of 8
    }
    if (C0 == nullptr) return;
    each_inside(it, lane, held,
                [&](int r, int c, float& value) { value = C::grad_qk ? C0[c * row + r] : C0[r * row + c]; });
    if constexpr (!C::reverse && !C::grad_qk) {
      if (lane.pair != 0) return;  // one lane of a quad has n, the others begin at zero
#pragma unroll
      for (int m = 0; m < panels; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (const int r = 64 * (Part * panels + m) + lane.row + 8 * h; r < call.dims.dqk) held.n[m][h] = n0[r];
    }
  }

  // The last state of a sequence goes to the caller.
  __device__ void finish(const Item& it, const Lane& lane, const Held& held) const {
    if constexpr (C::grad_qk) return;
    const StridedState& C_last = cta.call.carried.C_last;
    if constexpr (C::reverse) {
      if (it.low != 0) return;
      if (it.tile == 0 && cta.call.carried.n_last.data != nullptr) write_last_n(it, lane, held.n);
      if (C_last.data == nullptr) return;
    } else {
      if (C_last.data == nullptr || it.high != it.chunks) return;
    }
    float* to = static_cast<float*>(C_last.data) + it.sequence * C_last.sequence + it.head * C_last.head;
    each_inside(it, lane, held, [&](int r, int c, float& value) { to[r * C_last.row + c] = value; });
    if constexpr (!C::reverse) {
      if (it.tile == 0) write_last_n(it, lane, held.n);
    }
  }
  __device__ __forceinline__ void write_last_n(const Item& it, const Lane& lane, const N& n) const {
    const StridedState& n_last = cta.call.carried.n_last;
    write_n(static_cast<float*>(n_last.data) + it.sequence * n_last.sequence + it.head * n_last.head, lane, n);
  }
};

}  // namespace tfla::cuda::sm90::forward
