// bfloat16 as CUDA names it.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
// To the nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return {0x7FFF};
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__float2bfloat16_rn(x.x), __float2bfloat16_rn(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
