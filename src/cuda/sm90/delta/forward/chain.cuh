// forward_on_chip: the warpgroups of the chain. Each has 64 columns of C in registers, transposed, from the first token
// of a sequence to the last: a sum that is rounded in place is the operand of the next product, so that nothing on the
// way from one state to the next goes through shared memory.
//
//   Y^T = C^T K^T     O^T = C^T Q^T      X = V - (recall) Y
//   r^T = X^T - (beta X)^T Z^T           beta X and Z in two terms
//   C^T = decay C^T + (keep r)^T K       keep r in two terms
//   H^T = read O^T + r^T P^T             r in two terms
//
// One term of Z, of beta X or of r loses all digits where keys repeat (docs/delta.md).
#pragma once

#include "cuda/arch/mma.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/delta/forward/cta.cuh"

namespace tfla::cuda::sm90::delta_rule {

inline constexpr int token_steps = tile_tokens / 16;  // of a product over the tokens of a tile
using TokenOperand = std::uint32_t[token_steps][4];

// The numbers 16 step ... 16 step + 15 of a thread's rows as an operand, and what rounding left of them.
template <int R>
__device__ __forceinline__ void round_step(std::uint32_t (&operand)[4], const float (&x)[R], int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) operand[i] = arch::round_pair({x[8 * step + 2 * i], x[8 * step + 2 * i + 1]});
}
template <int R>
__device__ __forceinline__ void round_rest(std::uint32_t (&rest)[4], const std::uint32_t (&operand)[4],
                                           const float (&x)[R], int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 high = arch::widen_pair(operand[i]);
    rest[i] = arch::round_pair({x[8 * step + 2 * i] - high.x, x[8 * step + 2 * i + 1] - high.y});
  }
}

// f(place in a sum of 64 tokens, vector's number of that token), for all tokens of a thread.
template <class F>
__device__ __forceinline__ void each_token(const SolvedTile& solved, Vector vector, const TokenPair& own, const F& f) {
#pragma unroll
  for (int n = 0; n < tile_tokens / 8; ++n) {
    const float2 by = solved.pair(vector, n, own);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      f(4 * n + 2 * r, by.x);
      f(4 * n + 2 * r + 1, by.y);
    }
  }
}

// sum^T += operand square^T
__device__ __forceinline__ void multiply_square(float (&sum)[32], const TokenOperand& operand, unsigned square) {
#pragma unroll
  for (int step = 0; step < token_steps; ++step)
    arch::multiply<T, Major::depth>(sum, operand[step], arch::tile_at(square, step * 32), true);
}

template <class C, int W>
struct Chain {
  using Shared = ForwardShared<C>;
  using State = float[32 * C::key_panels];
  using Tokens = float[tile_tokens / 2];
  static constexpr int key_steps = 4 * C::key_panels;

  const ForwardItem<C>& item;
  Lane lane;
  TokenPair own{lane};

  __device__ __forceinline__ explicit Chain(const ForwardItem<C>& i) : item(i) {}

  [[nodiscard]] __device__ __forceinline__ int column() const { return item.column + W * panel; }

  // f(place in the state, row of dqk, column of dhv) for the numbers of a thread that a state has.
  template <class F>
  __device__ __forceinline__ void each_of_state(const F& f) const {
    const int dqk = item.call.dims.dqk, dhv = item.call.dims.dhv;
#pragma unroll
    for (int at = 0; at < 32 * C::key_panels; ++at) {
      const int row = at / 4 * 8 + lane.pair + at % 2, col = column() + lane.row + at / 2 % 2 * 8;
      if (row < dqk && col < dhv) f(at, row, col);
    }
  }
  [[nodiscard]] __device__ __forceinline__ float* carried(const StridedState& state) const {
    return static_cast<float*>(state.data) + item.sequence_number * state.sequence + item.head * state.head;
  }
  __device__ __forceinline__ void load_state(State& c) const {
#pragma unroll
    for (float& x : c) x = 0;
    const StridedState& initial = item.call.carried.initial;
    if (initial.data == nullptr) return;
    const float* from = carried(initial);
    each_of_state([&](int at, int row, int col) { c[at] = from[row * initial.row + col]; });
  }
  __device__ __forceinline__ void store_state(const State& c) const {
    const StridedState& last = item.call.carried.last;
    if (last.data == nullptr) return;
    float* to = carried(last);
    each_of_state([&](int at, int row, int col) { to[row * last.row + col] = c[at]; });
  }

  // Chains multiply by the state in turns, so that one rounds while the other multiplies.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (C::chains == 2) arch::named_wait(turn_of_0 + W, 2 * warpgroup_threads);
  }
  __device__ __forceinline__ void pass_turn(bool to_another) const {
    if constexpr (C::chains == 2) {
      if (to_another) arch::named_arrive(turn_of_0 + 1 - W, 2 * warpgroup_threads);
    }
  }

  // y = C^T K^T and o = C^T Q^T, two batches in flight on return.
  __device__ __forceinline__ void read_state(const State& c, Tokens& y, Tokens& o, unsigned slot, bool last) const {
    std::uint32_t operand[key_steps][4];
#pragma unroll
    for (int step = 0; step < key_steps; ++step) round_step(operand[step], c, step);
    take_turn();
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < key_steps; ++step)
      arch::multiply<T, Major::depth>(
          y, operand[step], arch::tile_at(slot + Shared::k, step / 4 * panel_bytes + step % 4 * 32), step > 0);
    arch::products_commit();
#pragma unroll
    for (int step = 0; step < key_steps; ++step)
      arch::multiply<T, Major::depth>(
          o, operand[step], arch::tile_at(slot + Shared::q, step / 4 * panel_bytes + step % 4 * 32), step > 0);
    arch::products_commit();
    pass_turn(W == 0 || !last);
    arch::products_wait<1>();
    arch::pin(y);
  }

  // y = V^T - recall y
  __device__ __forceinline__ void subtract_from_values(Tokens& y, unsigned slot, const SolvedTile& solved) const {
    const unsigned row = slot + Shared::v + W * panel_bytes + lane.transposed_row();
#pragma unroll
    for (int m = 0; m < token_steps; ++m) {
      std::uint32_t v[4];
      arch::load_tiles_transposed(v, row + m * 16 * panel_row_bytes);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 recall = solved.pair(Vector::recall, 2 * m + x / 2, own);
        const float2 values = arch::widen_pair(v[x]);
        float* at = y + 8 * m + 2 * x;
        at[0] = values.x - recall.x * at[0];
        at[1] = values.y - recall.y * at[1];
      }
    }
  }

  // r from X, in place. o and c are scaled while the products run.
  __device__ __forceinline__ void solve(Tokens& y, Tokens& o, State& c, const SolvedTile& solved) const {
    TokenOperand high, low;
    {
      Tokens written;
      each_token(solved, Vector::write, own, [&](int at, float beta) { written[at] = -beta * y[at]; });
#pragma unroll
      for (int step = 0; step < token_steps; ++step) {
        round_step(high[step], written, step);
        round_rest(low[step], high[step], written, step);
      }
    }
    arch::products_begin();
    multiply_square(y, high, solved.z());
    multiply_square(y, low, solved.z());
    multiply_square(y, high, solved.z() + second_term);
    arch::products_commit();
    each_token(solved, Vector::read, own, [&](int at, float read) { o[at] *= read; });
    const float decay = solved.one(Vector::decay, 0);
#pragma unroll
    for (float& x : c) x *= decay;
    arch::products_wait<0>();
    arch::pin(y);
  }

  // Waits for its products: with those of the scores in flight beside them, registers do not suffice, and ptxas
  // serializes all.
  __device__ __forceinline__ void add_to_state(State& c, const Tokens& y, unsigned slot,
                                               const SolvedTile& solved) const {
    TokenOperand high, low;
    Tokens kept;
    each_token(solved, Vector::keep, own, [&](int at, float keep) { kept[at] = keep * y[at]; });
#pragma unroll
    for (int step = 0; step < token_steps; ++step) {
      round_step(high[step], kept, step);
      round_rest(low[step], high[step], kept, step);
    }
    arch::pin(c);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < token_steps; ++step) {
      const std::uint64_t k = arch::tile_at(slot + Shared::k, step * 16 * panel_row_bytes, panel_bytes);
      arch::multiply<T, Major::across>(c, high[step], k, true);
      arch::multiply<T, Major::across>(c, low[step], k, true);
    }
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(c);
  }

  __device__ __forceinline__ void add_scores(Tokens& o, const Tokens& y, unsigned scores) const {
    TokenOperand high, low;
#pragma unroll
    for (int step = 0; step < token_steps; ++step) {
      round_step(high[step], y, step);
      round_rest(low[step], high[step], y, step);
    }
    arch::pin(o);
    arch::products_begin();
    multiply_square(o, high, scores);
    multiply_square(o, low, scores);
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(o);
  }

  // H into the place of V, and from there to memory.
  __device__ __forceinline__ void store_outputs(const Tokens& o, unsigned slot, int tile) const {
    const unsigned staged = slot + Shared::v + W * panel_bytes, row = staged + lane.transposed_row();
#pragma unroll
    for (int m = 0; m < token_steps; ++m) {
      const auto pack = [&](int x) { return arch::round_pair({o[8 * m + 2 * x], o[8 * m + 2 * x + 1]}); };
      arch::store_tiles_transposed(row + m * 16 * panel_row_bytes, pack(0), pack(1), pack(2), pack(3));
    }
    arch::writes_before_copies();
    arch::named_wait(staged_0 + W, warpgroup_threads);
    if (stores() && column() < item.call.dims.dhv) {
      arch::store_box(staged, &item.maps.h, column(), item.map_token(tile), item.head, item.map_batch());
      arch::commit_stores();
    }
  }
  [[nodiscard]] __device__ __forceinline__ bool stores() const { return threadIdx.x % warpgroup_threads == 0; }
  // Gives a slot back whose H has left it.
  __device__ __forceinline__ void release(int slot) const {
    if (stores()) {
      arch::wait_stores_read<0>();
      arch::arrive(item.shared.empty(slot));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    const Shared& shared = item.shared;
    State c;
    load_state(c);
    Ring<C::slots> ring;
    if (W == 1) pass_turn(item.tiles > 0);
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      const unsigned slot = shared.slot(ring.slot);
      const SolvedTile solved{slot + Shared::solved};
      arch::wait(shared.full(ring.slot), ring.phase);
      Tokens y, o;
      read_state(c, y, o, slot, tile + 1 == item.tiles);
      if (tile > 0) release(ring.slot == 0 ? C::slots - 1 : ring.slot - 1);
      subtract_from_values(y, slot, solved);
      arch::products_wait<0>();
      arch::pin(o);
      solve(y, o, c, solved);
      add_to_state(c, y, slot, solved);
      const auto scores = Ring<Shared::score_slots>::after_steps(tile);
      arch::wait(shared.scored(scores.slot), scores.phase);
      add_scores(o, y, shared.score_slot(scores.slot));
      if (lane.leads()) arch::arrive(shared.taken(scores.slot));
      store_outputs(o, slot, tile);
      ring.advance();
    }
    store_state(c);
    if (stores()) arch::wait_stores_read<0>();  // shared memory stays until then
  }
};

}  // namespace tfla::cuda::sm90::delta_rule
