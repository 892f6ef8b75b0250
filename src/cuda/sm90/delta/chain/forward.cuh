// forward_on_chip and states_on_chip: the warpgroups of the chain.
//
//   Y^T = C^T K^T     O^T = C^T Q^T      X = V - (recall) Y
//   r^T = X^T - (beta X)^T Z^T           beta X and Z in two terms
//   C^T = decay C^T + (keep r)^T K       keep r in two terms
//   H^T = read O^T + r^T P^T             r in two terms
//
// One term of Z, of beta X or of r loses all digits where keys repeat (docs/delta.md).
#pragma once

#include "cuda/sm90/delta/chain/place.cuh"

namespace tfla::cuda::sm90::delta_rule {

template <class C, int W>
struct ForwardChain {
  using Shared = ChainShared<C>;
  using State = typename ChainPlace<C, W>::State;
  using Tokens = typename ChainPlace<C, W>::Tokens;
  static constexpr bool makes_outputs = C::pass == Pass::outputs;

  ChainPlace<C, W> here;

  __device__ __forceinline__ explicit ForwardChain(const ChainItem<C>& item) : here(item) {}

  // y = C^T K^T and o = C^T Q^T, two batches in flight on return.
  __device__ __forceinline__ void read_state(const State& c, Tokens& y, Tokens& o, unsigned slot, bool last) const {
    typename ChainPlace<C, W>::StateOperand operand;
    here.round_state(operand, c);
    here.take_turn();
    arch::products_begin();
    here.multiply_state(y, operand, slot + Shared::k);
    arch::products_commit();
    if constexpr (makes_outputs) here.multiply_state(o, operand, slot + Shared::q);
    arch::products_commit();
    here.pass_turn(W == 0 || !last);
    arch::products_wait<1>();
    arch::pin(y);
  }

  // y = V^T - recall y
  __device__ __forceinline__ void subtract_from_values(Tokens& y, unsigned slot, const SolvedTile& solved) const {
    const unsigned row = slot + Shared::v + W * panel_bytes + here.lane.transposed_row();
#pragma unroll
    for (int m = 0; m < token_steps; ++m) {
      std::uint32_t v[4];
      arch::load_tiles_transposed(v, row + m * 16 * panel_row_bytes);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 recall = solved.pair(Vector::recall, 2 * m + x / 2, here.own);
        const float2 values = arch::widen_pair(v[x]);
        float* at = y + 8 * m + 2 * x;
        at[0] = values.x - recall.x * at[0];
        at[1] = values.y - recall.y * at[1];
      }
    }
  }

  // Waits for its products: with those of the scores in flight beside them, registers do not suffice, and ptxas
  // serializes all.
  __device__ __forceinline__ void add_to_state(State& c, const Tokens& y, unsigned slot,
                                               const SolvedTile& solved) const {
    TokenOperand high, low;
    Tokens kept;
    each_token(solved, Vector::keep, here.own, [&](int at, float keep) { kept[at] = keep * y[at]; });
    round_twice(high, low, kept);
    here.add_rows(c, high, low, slot + Shared::k);
  }

  __device__ __forceinline__ void add_scores(Tokens& o, const Tokens& y, unsigned scores) const {
    TokenOperand high, low;
    round_twice(high, low, y);
    arch::pin(o);
    arch::products_begin();
    multiply_square<Major::depth>(o, high, scores);
    multiply_square<Major::depth>(o, low, scores);
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(o);
  }

  // What a tile leaves: H, or its residuals. Then its slot is given back, at once or when H has left it.
  __device__ __forceinline__ void finish(Tokens& o, const Tokens& y, int slot_number, int step) const {
    const Shared& shared = here.item.shared;
    if constexpr (makes_outputs) {
      const auto scores = Ring<Shared::score_slots>::after_steps(step);
      arch::wait(shared.scored(scores.slot), scores.phase);
      add_scores(o, y, shared.score_slot(scores.slot));
      if (here.lane.leads()) arch::arrive(shared.taken(scores.slot));
      here.store_tokens(o, shared.slot(slot_number), step);
    } else {
      here.release_now(slot_number);
      here.keep_tokens(y, here.item.call.scratch.residuals, step);
    }
  }

  __device__ __forceinline__ void run() {
    const ChainItem<C>& item = here.item;
    const Shared& shared = item.shared;
    State c;
    here.load_state(c, item.call.carried.initial);
    Ring<C::slots> ring;
    if (W == 1) here.pass_turn(item.tiles > 0);
#pragma unroll 1
    for (int step = 0; step < item.tiles; ++step) {
      if constexpr (!makes_outputs) here.keep_state(c, item.call.scratch.states, step);
      const unsigned slot = shared.slot(ring.slot);
      const SolvedTile solved{slot + Shared::solved};
      arch::wait(shared.full(ring.slot), ring.phase);
      Tokens y, o;
      read_state(c, y, o, slot, step + 1 == item.tiles);
      if (makes_outputs && step > 0) here.release(ring.slot == 0 ? C::slots - 1 : ring.slot - 1);
      subtract_from_values(y, slot, solved);
      arch::products_wait<0>();
      if constexpr (makes_outputs) arch::pin(o);
      here.template solve<Major::depth>(y, c, solved, [&] {
        if constexpr (makes_outputs)
          each_token(solved, Vector::read, here.own, [&](int at, float read) { o[at] *= read; });
      });
      add_to_state(c, y, slot, solved);
      finish(o, y, ring.slot, step);
      ring.advance();
    }
    if constexpr (makes_outputs) here.store_state(c, item.call.carried.last);
    if (here.stores()) arch::wait_stores_read<0>();  // shared memory stays until then
  }
};

}  // namespace tfla::cuda::sm90::delta_rule
