// grad_v: its configurations.
#pragma once

#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::grad_v {

using namespace grad;

struct Options {
  int panels;  // of 64 columns of dhv in a tile
  bool packed;
};

template <class Type, Options O>
struct Config : ConfigBase<Type, O.packed> {
  static constexpr int panels = O.panels;
  static_assert(panels <= 4, "dV of 64 keys and their scores must fit the registers");

  // Per thread; 504 in all, what 384 threads at 168 own.
  static constexpr int load_registers = 24, math_registers[2] = {240, 240};
};

}  // namespace tfla::cuda::sm90::grad_v
