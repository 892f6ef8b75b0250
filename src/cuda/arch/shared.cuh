// Shared memory by its 32-bit address, as descriptors and barriers take it, and 8 x 8 tiles of 16-bit numbers there.
#pragma once

#include <cstdint>

namespace tfla::cuda::arch {

__device__ __forceinline__ float read_float(unsigned shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ float2 read_float2(unsigned shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ int read_int(unsigned shared) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ void write_int(unsigned shared, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}
__device__ __forceinline__ int2 read_int2(unsigned shared) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ float4 read_float4(unsigned shared) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}
__device__ __forceinline__ uint2 read_words(unsigned shared) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ uint4 read_quad(unsigned shared) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}
__device__ __forceinline__ void write_quad(unsigned shared, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ unsigned short read_half_word(unsigned shared) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(shared) : "memory");
  return x;
}
__device__ __forceinline__ void write_half_word(unsigned shared, unsigned short x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(x) : "memory");
}
__device__ __forceinline__ void write_float(unsigned shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}
__device__ __forceinline__ void write_float2(unsigned shared, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void write_int2(unsigned shared, int2 x) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(shared), "r"(x.x), "r"(x.y) : "memory");
}

// `bytes` of 4 or 8 from global memory, or zeros. Counted by arrive_after_copies.
template <int Bytes>
__device__ __forceinline__ void copy_small(unsigned shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(Bytes),
               "r"(valid ? Bytes : 0)
               : "memory");
}

// Four 8 x 8 tiles, one row address per lane; lane l holds elements (l / 4, 2 (l % 4)) and its neighbour.
__device__ __forceinline__ void load_tiles(std::uint32_t (&tiles)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_tiles_transposed(std::uint32_t (&tiles)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void store_tiles(unsigned row, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                            std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
// The transposes of the tiles.
__device__ __forceinline__ void store_tiles_transposed(unsigned row, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                                       std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

}  // namespace tfla::cuda::arch
