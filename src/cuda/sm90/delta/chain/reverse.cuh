// grad_states_on_chip: the warpgroups of the chain, from the last tile to the first.
//
//   dw^T = left dC^T K^T + dH^T P
//   dX^T = dw^T - (beta dw)^T Z     dV = beta dX           beta dw and Z in two terms
//   dC^T = decay dC^T + (read dH)^T Q - (recall dV)^T K    both in two terms
#pragma once

#include "cuda/sm90/delta/chain/place.cuh"

namespace tfla::cuda::sm90::delta_rule {

template <class C, int W>
struct ReverseChain {
  using Shared = ChainShared<C>;
  using State = typename ChainPlace<C, W>::State;
  using Tokens = typename ChainPlace<C, W>::Tokens;

  ChainPlace<C, W> here;

  __device__ __forceinline__ explicit ReverseChain(const ChainItem<C>& item) : here(item) {}

  // y = left dC^T K^T
  __device__ __forceinline__ void read_state(const State& c, Tokens& y, unsigned slot, const SolvedTile& solved,
                                             bool last) const {
    typename ChainPlace<C, W>::StateOperand operand;
    here.round_state(operand, c);
    here.take_turn();
    arch::products_begin();
    here.multiply_state(y, operand, slot + Shared::k);
    arch::products_commit();
    here.pass_turn(W == 0 || !last);
    arch::products_wait<0>();
    arch::pin(y);
    each_token(solved, Vector::left, here.own, [&](int at, float left) { y[at] *= left; });
  }

  // y += dH^T P
  __device__ __forceinline__ void add_scores(Tokens& y, unsigned slot, unsigned scores) const {
    const unsigned dh = slot + Shared::v + W * panel_bytes;
    arch::pin(y);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < token_steps; ++step) {
      const unsigned offset = step * 16 * panel_row_bytes;
      arch::multiply<T, Major::across, Major::across>(y, arch::tile_at(dh, offset), arch::tile_at(scores, offset),
                                                      true);
    }
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(y);
  }

  // What keys and queries add to dC. y: dV.
  __device__ __forceinline__ void add_to_state(State& c, const Tokens& y, unsigned slot,
                                               const SolvedTile& solved) const {
    TokenOperand high, low;
    {
      Tokens taken;
      each_token(solved, Vector::recall, here.own, [&](int at, float recall) { taken[at] = -recall * y[at]; });
      round_twice(high, low, taken);
    }
    here.add_rows(c, high, low, slot + Shared::k);
    const unsigned row = slot + Shared::v + W * panel_bytes + here.lane.transposed_row();
#pragma unroll
    for (int m = 0; m < token_steps; ++m) {
      std::uint32_t dh[4];
      float x[8];
      arch::load_tiles_transposed(dh, row + m * 16 * panel_row_bytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 read = solved.pair(Vector::read, 2 * m + i / 2, here.own), pair = arch::widen_pair(dh[i]);
        x[2 * i] = read.x * pair.x;
        x[2 * i + 1] = read.y * pair.y;
      }
      round_step(high[m], x, 0);
      round_rest(low[m], high[m], x, 0);
    }
    here.add_rows(c, high, low, slot + Shared::q);
  }

  __device__ __forceinline__ void run() {
    const ChainItem<C>& item = here.item;
    const Shared& shared = item.shared;
    State c;
    here.load_state(c, item.call.carried.dlast);
    Ring<C::slots> ring;
    if (W == 1) here.pass_turn(item.tiles > 0);
#pragma unroll 1
    for (int step = 0; step < item.tiles; ++step) {
      const int tile = item.tile_at(step);
      here.keep_state(c, item.call.scratch.grad_states, tile);
      const unsigned slot = shared.slot(ring.slot);
      const SolvedTile solved{slot + Shared::solved};
      arch::wait(shared.full(ring.slot), ring.phase);
      Tokens y;
      read_state(c, y, slot, solved, step + 1 == item.tiles);
      if (step > 0) here.release(ring.slot == 0 ? C::slots - 1 : ring.slot - 1);
      const auto scores = Ring<Shared::score_slots>::after_steps(step);
      arch::wait(shared.scored(scores.slot), scores.phase);
      add_scores(y, slot, shared.score_slot(scores.slot));
      if (here.lane.leads()) arch::arrive(shared.taken(scores.slot));
      here.template solve<Major::across>(y, c, solved, [] {});
      here.keep_tokens(y, item.call.scratch.grad_residuals, tile);
      each_token(solved, Vector::write, here.own, [&](int at, float beta) { y[at] *= beta; });
      add_to_state(c, y, slot, solved);
      here.store_tokens(y, slot, tile);
      ring.advance();
    }
    here.store_state(c, item.call.carried.dinitial);
    if (here.stores()) arch::wait_stores_read<0>();  // shared memory stays until then
  }
};

}  // namespace tfla::cuda::sm90::delta_rule
