// float16 has the digits that operands of tensor cores need, but not the range. Whatever is rounded to it on the chip
// is multiplied by a power of two first, which brings the largest of a tile to the upper end, and what comes of it is
// divided by that again where it is multiplied by something anyway. Lifts are found from the numbers themselves, not
// from bounds: those would take a pass over K and V of their own. bfloat16 has the range, and no code for this.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/shared.cuh"

namespace tfla::cuda::sm90 {

template <class T>
inline constexpr bool needs_scale16 = std::is_same_v<T, __half>;

// Where the largest number goes: to [2^top, 2^(top + 1)). Numbers that are added up afterwards have more room above.
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

// Weights of 64 tokens: their lift, the same in all threads. Each lane of a quad sees a quarter of them. weight(t): of
// tokens t and t + 1.
template <class Weight>
__device__ __forceinline__ float scale16_of_weights(int pair, const Weight& weight) {
  float largest = 0;
#pragma unroll
  for (int t = 0; t < 64; t += 8) {
    const float2 w = weight(t + pair);
    largest = fmaxf(largest, fmaxf(fabsf(w.x), fabsf(w.y)));
  }
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 2));
  return scale16_to(largest, top_of_weights, -60, 60);
}

// What a rounded state has been multiplied by, if what it was rounded from had a lift itself: such that 1 / (both) is a
// normal number.
__device__ __forceinline__ float scale16_of_state(float largest, float lift, int top = top_of_states) {
  const int before = exponent_of(lift);
  return power_of_two(max(exponent_to(largest, top, -100, 64), -126 - before));
}

// The largest of as many numbers over `Warps` warps, which all call this. places: two for every warp, 4 bytes for each
// number, in shared memory; turn: 0 or 1, in turn. barrier: a named one.
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
