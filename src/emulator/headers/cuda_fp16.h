// float16 as CUDA names it.
#pragma once

#include <cuda_runtime.h>

struct __half {
  std::uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
inline __half __float2half_rn(float x) { return {std::bit_cast<std::uint16_t>(static_cast<_Float16>(x))}; }
inline __half2 __float22half2_rn(float2 x) { return {__float2half_rn(x.x), __float2half_rn(x.y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
