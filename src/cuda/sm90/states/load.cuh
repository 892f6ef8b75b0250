// States on Hopper: the warps that load.
#pragma once

#include "cuda/arch/shared.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/sm90/states/cta.cuh"

namespace tfla::cuda::sm90::states {

template <class C>
struct Load {
  using S = Shared<C>;
  using Item = typename Cta<C>::Item;
  using Walk = typename Cta<C>::Walk;
  using Slots = typename Cta<C>::Slots;

  const Cta<C>& cta;

  // One thread: X and Y.
  __device__ void tokens() const {
    Slots ring;
    cta.each_item([&](const Item& it) {
      // Divided once: otherwise the compiler divides between a slot's wait and its loads, which that delays.
      int x_head = 0;
      if (C::packed) {
        x_head = it.head / cta.call.dims.group;
        arch::forget(x_head);
      }
      for (Walk walk(it, cta.blocks_per_chunk()); walk.more() && cta.adds(it, walk.chunk);
           walk.next(), ring.advance()) {
        const int token = it.map_token(cta.call) + walk.chunk * cta.call.dims.L + walk.block * token_block;
        const int batch = it.map_batch(cta.call);
        const unsigned slot = cta.shared.x(ring.slot);
        arch::wait(cta.shared.empty(ring.slot), ring.phase ^ 1);
        arch::arrive_expecting(cta.shared.full(ring.slot), S::slot_bytes);
        for (int p = 0; p < C::row_panels; ++p)
          arch::load_box(slot + p * panel_bytes, map_for(cta.maps, cta.maps.x, it.row + p * panel, cta.call.dims.dqk),
                         cta.shared.full(ring.slot), it.row + p * panel, token,
                         C::packed ? x_head : it.head / cta.call.dims.group, batch);
        for (int p = 0; p < C::columns / panel; ++p)
          arch::load_box(slot + S::x_bytes + p * panel_bytes,
                         map_for(cta.maps, cta.maps.y, it.column + p * panel, cta.call.dims.dhv),
                         cta.shared.full(ring.slot), it.column + p * panel, token, it.head, batch);
      }
    });
  }

  // One warp.
  __device__ void gates() const {
    const int lane = threadIdx.x % warp_threads;
    Slots ring;
    cta.each_item([&](const Item& it) {
      const float* weights = C::reverse ? cta.call.gates.qbar : cta.call.gates.abar;
      for (Walk walk(it, cta.blocks_per_chunk()); walk.more() && cta.adds(it, walk.chunk);
           walk.next(), ring.advance()) {
        const std::int64_t token = static_cast<std::int64_t>(walk.chunk) * cta.call.dims.L + walk.block * token_block;
        const std::int64_t at = it.head * cta.call.dims.all_tokens() + it.first_token(cta.call) + token;
        arch::wait(cta.shared.empty(ring.slot), ring.phase ^ 1);
        const unsigned to = cta.shared.gates(ring.slot);
        for (int t = lane; t < token_block; t += warp_threads) {
          const bool valid = token + t < it.tokens(cta.call);
          const std::int64_t from = valid ? at + t : at;
          arch::copy_small<4>(to + S::Gates::weight + 4 * t, weights + from, valid);
          if (C::reverse) arch::copy_small<4>(to + S::Gates::inverse + 4 * t, cta.call.gates.inverse + from, valid);
        }
        if (lane == 0) {
          const std::int64_t unit = (it.first_number + walk.chunk) * cta.call.dims.heads + it.head;
          arch::copy_small<4>(to + S::Gates::decay, cta.call.gates.gbar + unit, true);
        }
        arch::arrive_after_copies(cta.shared.full(ring.slot));
      }
    });
  }
};

}  // namespace tfla::cuda::sm90::states
