// Forward on Hopper: the warps that store.
#pragma once

#include "cuda/sm90/forward/cta.cuh"

namespace tfla::cuda::sm90::forward {

// One warp for each output warpgroup. H leaves out of Q's slot, which is free once that has been read.
template <class C>
struct Store {
  using Item = typename Cta<C>::Item;
  using Slots = typename Cta<C>::Slots;
  using Index = typename Cta<C>::Index;
  using Token = typename Cta<C>::Token;
  using Denominators = typename Shared<C>::Denominators;

  const Cta<C>& cta;

  __device__ void outputs(int warpgroup) const {
    const int lane = threadIdx.x % warp_threads;
    Slots ring(warpgroup);
    unsigned c_phase = 0;
    cta.each_block(warpgroup, [&](const Item& it, int block) {
      if (C::store_keeps_states) {
        arch::wait(cta.shared.c_full(warpgroup), c_phase);
        c_phase ^= 1;
        keep_state(it, block, warpgroup);
      }
      arch::named_wait(Shared<C>::staged(ring.slot, warpgroup), warpgroup_threads + warp_threads);
      if (!C::few_registers && keeps_denominators(it))
        store_denominators(it, block, cta.shared.denominators(ring.slot));
      if (lane == 0 && C::dqk_part != DqkPart::first) store_h(it, block, ring.slot);
      if (C::few_registers && keeps_denominators(it)) store_denominators(it, block, cta.shared.denominators(ring.slot));
      if (lane == 0) arch::wait_stores_read<0>();
      __syncwarp();
      if (arch::arrives(lane == 0)) arch::arrive(cta.shared.q_empty(ring.slot, 0));
      ring.advance(C::output_warpgroups);
    });
    if (lane == 0) arch::wait_stores<0>();
  }

 private:
  __device__ __forceinline__ void store_h(const Item& it, int block, int slot) const {
#pragma unroll 1
    for (int p = 0; p < C::columns / panel; ++p)
      arch::store_box(cta.shared.q(slot) + p * panel_bytes, &cta.maps.h, it.tile * C::columns + p * panel,
                      it.map_token(cta.call) + block * token_block, it.head, it.map_batch(cta.call));
    if constexpr (C::epilogue) store_ungated(it, block, slot);
    arch::commit_stores();
  }
  // H + D x lies where z was.
  __device__ __forceinline__ void store_ungated(const Item& it, int block, int slot) const {
    if (!cta.work.has_ungated) return;
#pragma unroll 1
    for (int p = 0; p < C::columns / panel; ++p)
      arch::store_box(cta.shared.z(slot) + p * panel_bytes, &cta.maps.ungated, it.tile * C::columns + p * panel,
                      it.map_token(cta.call) + block * token_block, it.head, it.map_batch(cta.call));
  }

  // Out of the buffer that the outputs read, which is free for the state when both are done.
  __device__ __forceinline__ void keep_state(const Item& it, int block, int warpgroup) const {
    const int lane = threadIdx.x % warp_threads;
    if (!C::reverse && it.tile == 0 && cta.is_kept(it, block)) keep_n(it, block, warpgroup);
    __syncwarp();
    if (lane == 0) {
      keep_c(it, block);
      arch::arrive(cta.shared.c_empty());
    }
    if (arch::for_racecheck && lane > 0) arch::arrive(cta.shared.c_empty());
  }
  __device__ void keep_c(const Item& it, int block) const {
    if (!cta.is_kept(it, block)) return;
#pragma unroll 1
    for (int p = 0; p < C::columns / panel; ++p)
      arch::store_box(cta.shared.state() + p * C::dqk_panels * panel_bytes, &cta.maps.states,
                      it.tile * C::columns + p * panel, 0, cta.kept_unit(it, block));
    arch::commit_stores();
    arch::wait_stores_read<0>();
  }
  // n lies in shared memory in three terms (State::publish_n).
  __device__ void keep_n(const Item& it, int block, int warpgroup) const {
    const unsigned from = cta.shared.n(warpgroup);
#pragma unroll 1
    for (int row = threadIdx.x % warp_threads; row < cta.call.dims.dqk; row += warp_threads) {
      const auto place = [&](int term) {
        if (C::n_is_wgmma_operand)
          return from + row / panel * Shared<C>::n_panel + (row % panel / 8 ^ term) * 16 + row % 8 * 2 +
                 term * Shared<C>::n_term;
        return from + row / 16 * 32 + row % 8 / 2 * 8 + row % 16 / 8 * 4 + row % 2 * 2 + term * Shared<C>::n_term;
      };
      float sum = 0;
#pragma unroll
      for (int term = 2; term >= 0; --term) sum += from_bits<typename C::T>(arch::read_half_word(place(term)));
      static_cast<float*>(
          cta.call.stored.n)[static_cast<std::int64_t>(cta.kept_unit(it, block)) * cta.call.dims.dqk + row] = sum;
    }
  }

  __device__ __forceinline__ bool keeps_denominators(const Item& it) const {
    return C::normalized && C::dqk_part != DqkPart::first && it.tile == 0 && cta.call.gates.inverse != nullptr;
  }
  __device__ void store_denominators(const Item& it, int block, unsigned from) const {
#pragma unroll 1
    for (int t = threadIdx.x % warp_threads; t < token_block; t += warp_threads) {
      const Token token = static_cast<Token>(block) * token_block + t;
      if (token >= it.tokens(cta.call)) continue;
      Index to = cta.vectors(it) + token;
      arch::forget(to);  // as in Load::gates_of_block
      cta.call.gates.inverse[to] = arch::read_float(from + Denominators::inverse + 4 * t);
      cta.call.gates.slope[to] = arch::read_float(from + Denominators::slope + 4 * t);
    }
  }
};

}  // namespace tfla::cuda::sm90::forward
