// In the place of cuda/arch/shared.cuh.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>
#include "emulator/tiles.h"

namespace tfla::cuda::arch {

template <class T>
T read_shared(unsigned shared) {
  if (shared % sizeof(T) != 0) emulator::fail("a read of shared memory is not aligned");
  T x;
  std::memcpy(&x, emulator::shared_at(shared, sizeof(T)), sizeof(T));
  return x;
}
template <class T>
void write_shared(unsigned shared, const T& x) {
  if (shared % sizeof(T) != 0) emulator::fail("a write to shared memory is not aligned");
  std::memcpy(emulator::shared_at(shared, sizeof(T)), &x, sizeof(T));
}

inline float read_float(unsigned shared) { return read_shared<float>(shared); }
inline float2 read_float2(unsigned shared) { return read_shared<float2>(shared); }
inline int read_int(unsigned shared) { return read_shared<int>(shared); }
inline void write_int(unsigned shared, int x) { write_shared(shared, x); }
inline int2 read_int2(unsigned shared) { return read_shared<int2>(shared); }
inline float4 read_float4(unsigned shared) { return read_shared<float4>(shared); }
inline uint2 read_words(unsigned shared) { return read_shared<uint2>(shared); }
inline uint4 read_quad(unsigned shared) { return read_shared<uint4>(shared); }
inline void write_quad(unsigned shared, uint4 x) { write_shared(shared, x); }
inline unsigned short read_half_word(unsigned shared) { return read_shared<unsigned short>(shared); }
inline void write_half_word(unsigned shared, unsigned short x) { write_shared(shared, x); }
inline void write_float(unsigned shared, float x) { write_shared(shared, x); }
inline void write_float2(unsigned shared, float2 x) { write_shared(shared, x); }
inline void write_int2(unsigned shared, int2 x) { write_shared(shared, x); }

template <int Bytes>
void copy_small(unsigned shared, const void* global, bool valid) {
  emulator::copy(emulator::shared_at(shared, Bytes), global, Bytes, valid ? Bytes : 0);
}

inline void load_tiles(std::uint32_t (&tiles)[4], unsigned row) { emulator::load_tiles(tiles, row, false); }
inline void load_tiles_transposed(std::uint32_t (&tiles)[4], unsigned row) { emulator::load_tiles(tiles, row, true); }
inline void store_tiles(unsigned row, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  emulator::store_tiles(row, {a, b, c, d}, false);
}
inline void store_tiles_transposed(unsigned row, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  emulator::store_tiles(row, {a, b, c, d}, true);
}

}  // namespace tfla::cuda::arch
