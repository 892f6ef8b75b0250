// grad_qk_reverse: its configurations.
#pragma once

#include "cuda/sm90/common/chunks.cuh"
#include "cuda/sm90/common/state_tile.cuh"

namespace tfla::cuda::sm90::grad_qk_reverse {

using namespace grad;

inline constexpr int tile_rows = 64;                       // of dqk
inline constexpr int tile_columns = 128, tile_panels = 2;  // of dhv, that the state adds at a time

struct Options {
  int dhv_panels;  // 64 columns each
  bool packed = false;
};

template <class Type, Options O>
struct Config : ConfigBase<Type, O.packed> {
  static constexpr int dhv_panels = O.dhv_panels;

  static constexpr int threads = 4 * warpgroup_threads;  // load and store, state, math 0, math 1

  // dC in tiles of 64 x 128, a chunk of tokens at a time. Queries enter as the sum of two bfloat16, as in grad_states.
  static constexpr TileConfig tile{.row_panels = 1,
                                   .columns = tile_columns,
                                   .terms = KeyTerms::two,
                                   .panels_at_once = 1,
                                   .operand_sets = 2,
                                   .paired_weights = true,
                                   .sums_n = false,
                                   .reads_ahead = false,
                                   .tokens = chunk_tokens,
                                   .value_panel_bytes = chunk_panel_bytes};

  // Per thread; 512 in all. The scores of math 0 are twice those of math 1.
  static constexpr int load_registers = 32, state_registers = 184, math_registers[2] = {160, 136};
};

}  // namespace tfla::cuda::sm90::grad_qk_reverse
