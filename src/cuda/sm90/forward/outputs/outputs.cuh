// Forward on Hopper: H.
#pragma once

#include "cuda/sm90/forward/outputs/epilogue.cuh"
#include "cuda/sm90/forward/outputs/factored.cuh"
#include "cuda/sm90/forward/outputs/plain.cuh"
#include "cuda/sm90/forward/outputs/wide.cuh"

namespace tfla::cuda::sm90::forward {

// One or two warpgroups, which take token blocks in turn.
template <class C>
struct Output {
  using Item = typename Cta<C>::Item;
  using Slots = typename Cta<C>::Slots;
  using KeySlots = typename Cta<C>::KeySlots;

  const Cta<C>& cta;

  __device__ void make(int warpgroup) const {
    if constexpr (C::split_state)
      make_all(warpgroup);
    else
      make_in_turn(warpgroup);
  }

 private:
  // All token blocks. What follows from their number takes no register from one to the next.
  __device__ __forceinline__ void make_all(int warpgroup) const {
    const Lane lane;
    unsigned blocks = 0;
    cta.each_block(warpgroup, [&](const Item& it, int block) {
      make_block(warpgroup, lane, Slots::after_steps(blocks), KeySlots::after_steps(C::parts * blocks), blocks & 1,
                 cta.is_fresh(it, block), it, block);
      ++blocks;
    });
  }
  // Every other one.
  __device__ __forceinline__ void make_in_turn(int warpgroup) const {
    const Lane lane;
    Slots ring(warpgroup);
    KeySlots k(warpgroup * C::parts);
    unsigned c_phase = 0;
    cta.each_block(warpgroup, [&](const Item& it, int block) {
      const bool fresh = cta.is_fresh(it, block);
      make_block(warpgroup, lane, ring, k, c_phase, fresh, it, block);
      ring.advance(C::output_warpgroups);
      k.advance(C::output_warpgroups * C::parts);
      c_phase ^= C::skips_fresh && fresh ? 0 : 1;
    });
  }

  __device__ __forceinline__ void make_block(int warpgroup, const Lane& lane, const Slots& ring, const KeySlots& k,
                                             unsigned c_phase, bool fresh, const Item& it, int block) const {
    const TokenBlock<C> b{
        cta, warpgroup, lane, ring, k, c_phase, fresh, it, block, cta.shared.q(ring.slot), cta.shared.gates(ring.slot)};
    Outputs<C> o;
    Rows<C> rows;
    if constexpr (C::schedule == Schedule::factored)
      make_factored(b, o, rows);
    else if constexpr (C::schedule == Schedule::wide)
      make_wide(b, o, rows);
    else
      make_plain(b, o, rows);
    read_factors<1>(b, rows);
    add_products<0, C>(o, rows);
    if constexpr (C::epilogue) add_skip(b, o, rows);
    __syncwarp();  // all lanes have read the gates
    if (arch::arrives(b.here().lane == 0)) arch::arrive(cta.shared.v_empty(ring.slot));
    if constexpr (C::dqk_part == DqkPart::first)
      leave_partial(b, o, rows);
    else if constexpr (C::epilogue)
      stage_gated(b, o);
    else
      stage(b, o, rows);
    add_products<1, C>(o, rows);
    write_row_sums(b, rows);
    if (C::readers_of_places > 0) arch::arrive(cta.shared.q_empty(ring.slot, 0));
    // This warpgroup has read Q.
    arch::named_arrive(Shared<C>::staged(ring.slot, warpgroup), warpgroup_threads + warp_threads);
  }

  // H, rounded, where Q was.
  __device__ __forceinline__ static void stage(const TokenBlock<C>& b, const Outputs<C>& o, const Rows<C>& rows) {
    arch::named_wait(output_barrier + b.warpgroup, warpgroup_threads);  // no warp reads Q any more
    const unsigned row = b.q + b.here().tile_row();
#pragma unroll
    for (int n = 0; n < C::columns / 16; ++n) {
      const float* x = o + 8 * n;
      const auto pack = [&](int e) {
        const float by = rows.factor[e / 2 % 2];
        return arch::pack(C::late_factors ? float2{x[e] * by, x[e + 1] * by} : float2{x[e], x[e + 1]}, typename C::T{});
      };
      arch::store_tiles((row + n / 4 * panel_bytes) ^ (n % 4 * 32), pack(0), pack(2), pack(4), pack(6));
    }
    arch::writes_before_copies();
  }
};

}  // namespace tfla::cuda::sm90::forward
