// States on Hopper: what a kernel is compiled for, and what follows from it.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/sm90/common/limits.h"
#include "cuda/sm90/common/scale16.cuh"
#include "cuda/sm90/common/state_tile.cuh"

namespace tfla::cuda::sm90::states {

// The states themselves; the totals of segments, from which they start; the same to the digits that H shows.
enum class Pass : std::uint8_t { states, totals, rough_totals };

struct Options {
  int row_panels;  // 64 rows of dqk each
  int columns;     // of dhv
  Time direction;
  Pass pass;
  bool packed = false;
};

// The columns of a CTA are dealt out to so many warpgroups.
constexpr int state_warpgroups(int columns) { return columns > 64 ? 2 : 1; }

template <class Type, Options O>
struct Config {
  using T = Type;
  static constexpr int row_panels = O.row_panels, columns = O.columns;
  static constexpr Time direction = O.direction;
  static constexpr Pass pass = O.pass;
  static constexpr bool packed = O.packed;

  static constexpr bool reverse = direction == Time::reverse;
  static constexpr bool makes_states = pass == Pass::states;  // otherwise totals
  static constexpr bool scaled = needs_scale16<T>;            // float16: what is rounded has a scale16

  static constexpr int rows = 64 * row_panels;
  static constexpr int warpgroups = state_warpgroups(columns);
  static constexpr int warpgroup_columns = columns / warpgroups;
  static constexpr int threads = (1 + warpgroups) * warpgroup_threads;  // one more warpgroup loads and stores

  static constexpr bool paired_weights = !scaled && (!makes_states || row_panels == 1);
  static constexpr TileConfig tile{.row_panels = row_panels,
                                   .columns = warpgroup_columns,
                                   .terms = scaled || pass == Pass::rough_totals ? KeyTerms::one : KeyTerms::two,
                                   .panels_at_once = paired_weights || row_panels == 1 ? 1 : 2,
                                   .operand_sets = 2,
                                   .paired_weights = paired_weights,
                                   .sums_n = true,
                                   .reads_ahead = false};

  // CTAs of a multiprocessor. Those of small heads mostly wait: there are as many as shared memory and registers have
  // room for.
  static constexpr int ctas = row_panels > 1 || columns > 64 ? 1 : reverse ? 4 : 2;
  static constexpr int move_registers = 40;
  static constexpr int state_registers =
      ctas == 1 ? 232 : multiprocessor_registers / (ctas * warpgroup_threads) - move_registers;
};

}  // namespace tfla::cuda::sm90::states
