// Tensor-core products of 16-bit tiles (mma.sync, sm_80 and newer).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tfla::cuda::arch {

// Two neighbours of a 16-bit tile, as the tensor cores hold them, and back.
__device__ __forceinline__ uint32_t pack(float2 x, __nv_bfloat16) {
  const __nv_bfloat162 pair = __float22bfloat162_rn(x);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float2 x, __half) {
  const __half2 pair = __float22half2_rn(x);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// d += a b with a 16x16, b 16x8, d 16x8.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Pairs of bfloat16 in 32 bits, the first one in the lower half. By themselves, so that the compiler does not take them
// apart. a b and a b + c are rounded once (sm_90).
__device__ __forceinline__ std::uint32_t round_pair(float2 x) {
  std::uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(x.y), "f"(x.x));
  return d;
}
__device__ __forceinline__ float2 widen_pair(std::uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000U)};
}
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ std::uint32_t negate_pair(std::uint32_t a) { return a ^ 0x80008000U; }
__device__ __forceinline__ std::uint32_t multiply_add_pairs(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace tfla::cuda::arch
