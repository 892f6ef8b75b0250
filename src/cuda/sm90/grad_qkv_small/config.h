// grad_qkv_small: its configurations.
#pragma once

#include <cuda_bf16.h>

#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::grad_qkv_small {

using namespace grad;

struct Options {
  int columns;  // of Q, K, V and dH that are multiplied: 32 or 64
  bool packed;
};

template <Options O>
struct Config : ConfigBase<__nv_bfloat16, O.packed> {
  static constexpr int columns = O.columns;

  static constexpr int ctas = 2;  // of a multiprocessor
  // Per thread; 240 in all, what 384 threads at 80 own. Math warpgroup 1 has half the scores.
  static constexpr int load_registers = 24, math_registers[2] = {120, 96};
};

}  // namespace tfla::cuda::sm90::grad_qkv_small
