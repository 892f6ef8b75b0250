// Scales of float16 operands. float16 has the digits that operands of tensor cores need, but not the range. Before a
// kernel rounds a tile to float16, it multiplies it by a power of two, the tile's scale16, which brings the largest
// number near the upper end of the range. The inverse goes into a factor that the product is multiplied by anyway.
// Scales are computed from the numbers themselves: bounds would take another pass over K and V. bfloat16 has the range
// of float32; its kernels are compiled without any of this.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/sm90/common/limits.h"

namespace tfla::cuda::sm90 {

template <class T>
inline constexpr bool needs_scale16 = std::is_same_v<T, __half>;

// The scale brings the largest number to [2^top, 2^(top + 1)). Numbers that are added up afterwards have more room
// above.
inline constexpr int top_of_states = 14, top_of_scores = 13, top_of_weights = -1, top_of_norms = 12;

// 2^exponent, for exponents from -126 to 127, and 1 / 2^exponent.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }
__device__ __forceinline__ float inverse_power(float power) {
  return __int_as_float((254 << 23) - __float_as_int(power));
}
__device__ __forceinline__ int exponent_of(float power) { return (__float_as_int(power) >> 23) - 127; }

// The exponent that takes `largest`, which is not negative, to `top`, within limits. None for zero, infinity and NaN.
__device__ __forceinline__ int exponent_to(float largest, int top, int least, int most) {
  const int exponent = exponent_of(largest);
  return largest == 0 || exponent > 127 ? 0 : min(max(top - exponent, least), most);
}
__device__ __forceinline__ float scale16_to(float largest, int top, int least, int most) {
  return power_of_two(exponent_to(largest, top, least, most));
}

// The scale16 of the weights of a token block, the same in all threads. Each lane of a quad reads a quarter of them.
// weight(t): the weights of tokens t and t + 1.
template <class Weight>
__device__ __forceinline__ float scale16_of_weights(int pair, const Weight& weight) {
  float largest = 0;
#pragma unroll
  for (int t = 0; t < token_block; t += 8) {
    const float2 w = weight(t + pair);
    largest = fmaxf(largest, fmaxf(fabsf(w.x), fabsf(w.y)));
  }
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 2));
  return scale16_to(largest, top_of_weights, -60, 60);
}

// The scale16 of a state whose numbers carry a factor `scale` already: `largest` is with it. Limited such that
// 1 / (scale * result) is a normal number.
__device__ __forceinline__ float scale16_of_state(float largest, float scale, int top = top_of_states) {
  const int before = exponent_of(scale);
  return power_of_two(max(exponent_to(largest, top, -100, 64), -126 - before));
}

// The largest number, or the two largest numbers, that `Warps` warps have, all of which call this. places: in shared
// memory, for every warp two places of as many numbers; turn: 0 or 1, the other one at every call. barrier: a named
// one.
__device__ __forceinline__ float largest_of_warp(float x) {
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFU, __float_as_uint(x)));
}
template <int Warps>
__device__ __forceinline__ float largest_of_warps(float own, unsigned places, unsigned turn, int warp, int barrier) {
  own = largest_of_warp(own);
  places += turn * (Warps * 4);
  if (threadIdx.x % 32 == 0) arch::write_float(places + 4 * warp, own);
  arch::named_wait(barrier, Warps * 32);
  float all = 0;
#pragma unroll
  for (int w = 0; w < Warps; w += 4) {
    const float4 some = arch::read_float4(places + 4 * w);
    all = fmaxf(all, fmaxf(fmaxf(some.x, some.y), fmaxf(some.z, some.w)));
  }
  return all;
}
template <int Warps>
__device__ __forceinline__ float2 largest_of_warps(float2 own, unsigned places, unsigned turn, int warp, int barrier) {
  own = {largest_of_warp(own.x), largest_of_warp(own.y)};
  places += turn * (Warps * 8);
  if (threadIdx.x % 32 == 0) arch::write_float2(places + 8 * warp, own);
  arch::named_wait(barrier, Warps * 32);
  float2 all{0, 0};
#pragma unroll
  for (int w = 0; w < Warps; w += 2) {
    const float4 pair = arch::read_float4(places + 8 * w);
    all = {fmaxf(all.x, fmaxf(pair.x, pair.z)), fmaxf(all.y, fmaxf(pair.y, pair.w))};
  }
  return all;
}

}  // namespace tfla::cuda::sm90
