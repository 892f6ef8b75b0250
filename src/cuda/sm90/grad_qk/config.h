// grad_qk: its configurations.
#pragma once

#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::grad_qk {

using namespace grad;

inline constexpr int tile_columns = 128;  // of dqk
inline constexpr int tile_panels = tile_columns / panel;
inline constexpr int trace_warps = warpgroup_warps;  // of math warpgroup 1, each of which leaves a part of <C, dC>

struct Options {
  bool norm;  // with gradients of n
  bool packed;
};

template <class Type, Options O>
struct Config : ConfigBase<Type, O.packed> {
  static constexpr bool norm = O.norm;
  static constexpr bool dots_only = false;  // see row_dots

  // Per thread; 504 in all, what 384 threads at 168 own. With gradients of n the gates take more; math warpgroup 1,
  // which has half the scores, gives them.
  static constexpr int load_registers = norm ? 40 : 24, math_registers[2] = {240, 264 - load_registers};
};

}  // namespace tfla::cuda::sm90::grad_qk
