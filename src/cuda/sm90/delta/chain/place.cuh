// Kernels along the chain of states: what their warpgroups have in common. Each has 64 columns of a state in registers,
// transposed: a sum that is rounded in place is the operand of the next product, so that nothing on the way from one
// state to the next goes through shared memory.
#pragma once

#include "cuda/arch/mma.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/delta/chain/cta.cuh"

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

// sum^T += operand square^T, with the depth along the rows of the square; across them sum^T += operand square
template <Major Square>
__device__ __forceinline__ void multiply_square(float (&sum)[32], const TokenOperand& operand, unsigned square) {
#pragma unroll
  for (int step = 0; step < token_steps; ++step) {
    const unsigned offset = Square == Major::depth ? step * 32 : step * 16 * panel_row_bytes;
    arch::multiply<T, Square>(sum, operand[step], arch::tile_at(square, offset), true);
  }
}

// A sum of all tokens in two terms.
__device__ __forceinline__ void round_twice(TokenOperand& high, TokenOperand& low, const float (&x)[32]) {
#pragma unroll
  for (int step = 0; step < token_steps; ++step) {
    round_step(high[step], x, step);
    round_rest(low[step], high[step], x, step);
  }
}

// A chain of states of a CTA: warpgroup W of them.
template <class C, int W>
struct ChainPlace {
  using Shared = ChainShared<C>;
  using State = float[32 * C::key_panels];
  using Tokens = float[tile_tokens / 2];
  static constexpr int key_steps = 4 * C::key_panels;

  const ChainItem<C>& item;
  Lane lane;
  TokenPair own{lane};

  __device__ __forceinline__ explicit ChainPlace(const ChainItem<C>& i) : item(i) {}

  [[nodiscard]] __device__ __forceinline__ int column() const { return item.column + W * panel; }

  // f(place in the state, row of dqk, column of dhv) for the numbers of a thread that a state has.
  template <class F>
  __device__ __forceinline__ void each_of_state(const F& f) const {
    const int dqk = item.call.dims.dqk, dhv = item.call.dims.dhv;
    const Lane lane = Lane::again();
#pragma unroll
    for (int at = 0; at < 32 * C::key_panels; ++at) {
      const int row = at / 4 * 8 + lane.pair + at % 2, col = column() + lane.row + at / 2 % 2 * 8;
      if (row < dqk && col < dhv) f(at, row, col);
    }
  }
  [[nodiscard]] __device__ __forceinline__ float* carried(const StridedState& state) const {
    return static_cast<float*>(state.data) + item.sequence_number * state.sequence + item.head * state.head;
  }
  // The state that a caller gives, or zero, and the one that is wanted.
  __device__ __forceinline__ void load_state(State& c, const StridedState& given) const {
#pragma unroll
    for (float& x : c) x = 0;
    if (given.data == nullptr) return;
    const float* from = carried(given);
    each_of_state([&](int at, int row, int col) { c[at] = from[row * given.row + col]; });
  }
  __device__ __forceinline__ void store_state(const State& c, const StridedState& wanted) const {
    if (wanted.data == nullptr) return;
    float* to = carried(wanted);
    each_of_state([&](int at, int row, int col) { to[row * wanted.row + col] = c[at]; });
  }
  // The state at a tile to scratch.
  __device__ __forceinline__ void keep_state(const State& c, float* states, int tile) const {
    float* to = states + item.state(tile);
    const std::int64_t columns = item.call.dims.dhv;
    each_of_state([&](int at, int row, int col) { to[row * columns + col] = c[at]; });
  }
  // Numbers of a tile's tokens to scratch [B,T,H,dhv].
  __device__ __forceinline__ void keep_tokens(const Tokens& x, float* rows, int tile) const {
    const int count = item.count(tile), columns = item.call.dims.dhv;
    float* to = rows + item.row(tile) * columns;
    const std::int64_t row = static_cast<std::int64_t>(item.call.dims.heads) * columns;
    const Lane lane = Lane::again();
#pragma unroll
    for (int at = 0; at < tile_tokens / 2; ++at) {
      const int token = at / 4 * 8 + lane.pair + at % 2, col = column() + lane.row + at / 2 % 2 * 8;
      if (token < count && col < columns) to[token * row + col] = x[at];
    }
  }

  // A state as an operand, and sum^T = state^T rows^T for the rows of keys or queries of a tile.
  using StateOperand = std::uint32_t[key_steps][4];
  __device__ __forceinline__ static void round_state(StateOperand& operand, const State& c) {
#pragma unroll
    for (int step = 0; step < key_steps; ++step) round_step(operand[step], c, step);
  }
  __device__ __forceinline__ static void multiply_state(Tokens& sum, const StateOperand& operand, unsigned rows) {
#pragma unroll
    for (int step = 0; step < key_steps; ++step) {
      const unsigned offset = step / 4 * panel_bytes + step % 4 * 32;
      arch::multiply<T, Major::depth>(sum, operand[step], arch::tile_at(rows, offset), step > 0);
    }
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

  // y^T -= (beta y)^T Z^T; across the rows of Z, (beta y)^T Z. While the products run the state decays, and `besides`
  // is called.
  template <Major Square, class Besides>
  __device__ __forceinline__ void solve(Tokens& y, State& c, const SolvedTile& solved, const Besides& besides) const {
    TokenOperand high, low;
    {
      Tokens written;
      each_token(solved, Vector::write, own, [&](int at, float beta) { written[at] = -beta * y[at]; });
      round_twice(high, low, written);
    }
    arch::products_begin();
    multiply_square<Square>(y, high, solved.z());
    multiply_square<Square>(y, low, solved.z());
    multiply_square<Square>(y, high, solved.z() + second_term);
    arch::products_commit();
    besides();
    const float decay = solved.one(Vector::decay, 0);
#pragma unroll
    for (float& x : c) x *= decay;
    arch::products_wait<0>();
    arch::pin(y);
  }

  // state^T += (high + low) tokens, for a tile of rows of keys or queries. Waits for its products.
  __device__ __forceinline__ void add_rows(State& c, const TokenOperand& high, const TokenOperand& low,
                                           unsigned rows) const {
    arch::pin(c);
    arch::products_begin();
#pragma unroll
    for (int step = 0; step < token_steps; ++step) {
      const std::uint64_t at = arch::tile_at(rows, step * 16 * panel_row_bytes, panel_bytes);
      arch::multiply<T, Major::across>(c, high[step], at, true);
      arch::multiply<T, Major::across>(c, low[step], at, true);
    }
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(c);
  }

  // Numbers of a tile's tokens into the place of V or dH, and from there to memory.
  __device__ __forceinline__ void store_tokens(const Tokens& x, unsigned slot, int tile) const {
    const unsigned staged = slot + Shared::v + W * panel_bytes, row = staged + lane.transposed_row();
#pragma unroll
    for (int m = 0; m < token_steps; ++m) {
      const auto pack = [&](int i) { return arch::round_pair({x[8 * m + 2 * i], x[8 * m + 2 * i + 1]}); };
      arch::store_tiles_transposed(row + m * 16 * panel_row_bytes, pack(0), pack(1), pack(2), pack(3));
    }
    arch::writes_before_copies();
    arch::named_wait(done_0 + W, warpgroup_threads);
    if (stores() && column() < item.call.dims.dhv) {
      arch::store_box(staged, &item.maps.h, column(), item.map_token(tile), item.head, item.map_batch());
      arch::commit_stores();
    }
  }
  [[nodiscard]] __device__ __forceinline__ bool stores() const { return threadIdx.x % warpgroup_threads == 0; }
  // Gives a slot back that all warps have read.
  __device__ __forceinline__ void release_now(int slot) const {
    arch::named_wait(done_0 + W, warpgroup_threads);
    if (stores()) arch::arrive(item.shared.empty(slot));
    __syncwarp();
  }
  // Gives a slot back through which numbers have left.
  __device__ __forceinline__ void release(int slot) const {
    if (stores()) {
      arch::wait_stores_read<0>();
      arch::arrive(item.shared.empty(slot));
    }
    __syncwarp();
  }
};

}  // namespace tfla::cuda::sm90::delta_rule
