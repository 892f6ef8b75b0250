// grad_qkv: its configurations.
#pragma once

#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::grad_qkv {

using namespace grad;

struct Options {
  int dqk_panels, dhv_panels;  // of 64 columns
  bool packed;
};

template <class Type, Options O>
struct Config : ConfigBase<Type, O.packed> {
  static constexpr int dqk_panels = O.dqk_panels, dhv_panels = O.dhv_panels;
  static constexpr bool state_scales_in_gates = needs_scale16<Type>;  // C and dC are one tile each

  // Per thread; 504 in all, what 384 threads at 168 own.
  static constexpr int load_registers = 24, math_registers = 240;
};

// The largest heads: dK, dQ and scores of 64 tokens fill the registers, Q, K and dH of a chunk the shared memory.
inline constexpr int largest_dqk = 2 * panel, largest_dhv = 4 * panel;

}  // namespace tfla::cuda::sm90::grad_qkv
