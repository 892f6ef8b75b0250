// Sizes that Hopper's kernels and the plan agree on.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tfla::hopper {

inline constexpr int token_block = 64;     // tokens that forward takes at a time
inline constexpr int chunk = 128;          // tokens between the states that backward reads
inline constexpr int dqk_of_a_pass = 256;  // rows of the state that forward has in registers
inline constexpr int trace_columns = 128;  // of dqk in a tile of grad_qk
inline constexpr int checkpoint = 256;     // tokens between those at which grad_k_reverse makes <C, dC>
inline constexpr int warps = 4;            // of a warpgroup

[[nodiscard]] constexpr std::int64_t tiles(std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; }

// Tiles of a state in kernel states, and those of them side by side over dhv.
[[nodiscard]] constexpr std::int64_t state_columns(std::int64_t dhv) { return dhv <= 128 ? 1 : tiles(dhv, 256); }
[[nodiscard]] constexpr std::int64_t state_tiles(std::int64_t dqk, std::int64_t dhv) {
  return (dqk <= 64 ? 1 : tiles(dqk, 128)) * state_columns(dhv);
}
// Tiles of columns in forward.
[[nodiscard]] constexpr std::int64_t forward_tiles(std::int64_t dhv) { return dhv > 64 ? tiles(dhv, 128) : 1; }
// Parts in which grad_states leaves <C, dC> of a chunk: one per warp that has some of the state.
[[nodiscard]] constexpr std::int64_t through_parts(std::int64_t dqk, std::int64_t dhv) {
  return state_tiles(dqk, dhv) * warps * (dqk <= 64 && dhv <= 64 ? 1 : 2);
}
// Parts in which grad_qk leaves it.
[[nodiscard]] constexpr std::int64_t trace_parts(std::int64_t dqk) { return tiles(dqk, trace_columns) * warps; }
// Numbers of a state that grad_q_forward leaves at a checkpoint, a tile of dhv by dqk, and the parts in which <C, dC>
// comes from grad_k_reverse: one per warp that has some of the state.
[[nodiscard]] constexpr std::int64_t checkpoint_numbers(std::int64_t dqk) { return 256 * (dqk <= 64 ? 64 : 128); }
[[nodiscard]] constexpr std::int64_t checkpoint_parts(std::int64_t dqk) { return warps * (dqk <= 64 ? 1 : 2); }
// Numbers that the first pass over dqk above 256 leaves for a token block: O and the row sums.
[[nodiscard]] constexpr std::int64_t partial_floats(std::int64_t dhv) {
  return forward_tiles(dhv) * (token_block * 128 + token_block);
}

}  // namespace tfla::hopper
