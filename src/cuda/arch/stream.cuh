// Global memory that is written once and read once: past the first-level cache.
#pragma once

namespace tfla::cuda::arch {

// In flight until the value is used.
__device__ __forceinline__ float read_once(const float* from) {
  float value;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ float4 read_once(const float4* from) {
  float4 value;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint4 read_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
// Through the first-level cache. In flight until the value is used.
__device__ __forceinline__ unsigned read_word(const unsigned* from) {
  unsigned value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ void write_once(float4* to, float4 value) { __stcs(to, value); }
__device__ __forceinline__ void write_once(uint4* to, uint4 value) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Into the second-level cache (sm_90). Address and size are multiples of 16.
__device__ __forceinline__ void prefetch(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace tfla::cuda::arch
