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
  static_assert(dqk_panels <= 2, "dK, dQ and scores of 64 tokens must fit the registers");
  static_assert(dhv_panels <= 4, "Q, K and dH of a chunk must fit the shared memory");
  static constexpr bool state_scales_in_gates = needs_scale16<Type>;  // C and dC are one tile each

  // Whether dK of the next tile begins before the results of this one are written. With one panel of dhv ptxas would
  // serialize all products, and spill.
  static constexpr bool begins_next_tile = dhv_panels > 1;

  // Per thread; 504 in all, what 384 threads at 168 own.
  static constexpr int load_registers = 24, math_registers[2] = {240, 240};
};

}  // namespace tfla::cuda::sm90::grad_qkv
