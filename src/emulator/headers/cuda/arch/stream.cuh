// In the place of cuda/arch/stream.cuh.
#pragma once

#include <cuda_runtime.h>

namespace tfla::cuda::arch {

inline float read_once(const float* from) { return *from; }
inline float4 read_once(const float4* from) { return *from; }
inline uint4 read_once(const uint4* from) { return *from; }
inline unsigned read_word(const unsigned* from) { return *from; }
inline void write_once(float4* to, float4 value) { *to = value; }
inline void write_once(uint4* to, uint4 value) { *to = value; }
inline void prefetch(const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
    emulator::fail("a prefetch takes multiples of 16 bytes");
}

}  // namespace tfla::cuda::arch
