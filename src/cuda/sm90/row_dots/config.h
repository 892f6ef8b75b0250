// row_dots: its configurations.
#pragma once

#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::row_dots {

struct Options {
  bool packed;
};

// A kernel on the tiles, shared memory and load warps of grad_qk.
template <class Type, Options O>
struct Config : grad::ConfigBase<Type, O.packed> {
  static constexpr bool dots_only = true;  // without dC, and nothing is stored but dots

  // Per thread; 504 in all, what 384 threads at 168 own.
  static constexpr int load_registers = 24, math_registers = 240;
};

}  // namespace tfla::cuda::sm90::row_dots
