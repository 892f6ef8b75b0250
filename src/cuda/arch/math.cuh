// Arithmetic that the hardware has and the language hides.
#pragma once

namespace tfla::cuda::arch {

// 2^x to two units in the last place; results below 2^-126 are zero.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tfla::cuda::arch
