// In the place of cuda/arch/mma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "emulator/tiles.h"

namespace tfla::cuda::arch {

inline std::uint32_t pack(float2 x, __nv_bfloat16) { return std::bit_cast<std::uint32_t>(__float22bfloat162_rn(x)); }
inline std::uint32_t pack(float2 x, __half) { return std::bit_cast<std::uint32_t>(__float22half2_rn(x)); }
inline float2 unpack(std::uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(std::bit_cast<__nv_bfloat162>(pair));
}
inline float2 unpack(std::uint32_t pair, __half) { return __half22float2(std::bit_cast<__half2>(pair)); }

template <class T>
void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, T) {
  emulator::multiply_tiles(d, a, b0, b1, emulator::item_of<T>);
}

inline std::uint32_t round_pair(float2 x) { return pack(x, __nv_bfloat16{}); }
inline float2 widen_pair(std::uint32_t x) { return unpack(x, __nv_bfloat16{}); }
inline std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  const float2 x = widen_pair(a), y = widen_pair(b);
  return round_pair({x.x * y.x, x.y * y.y});
}
inline std::uint32_t negate_pair(std::uint32_t a) { return a ^ 0x80008000U; }
inline std::uint32_t multiply_add_pairs(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const float2 x = widen_pair(a), y = widen_pair(b), z = widen_pair(c);
  return round_pair({std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y)});
}

}  // namespace tfla::cuda::arch
