// CUDA's language and as much of its runtime as src/cuda and its tests use, on the emulated GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "emulator/lanes.h"
#include "emulator/machine.h"
#include "emulator/runtime.h"

#define __device__
#define __host__
#define __global__ static
#define __forceinline__ inline
#define __shared__ thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_LIST__ 800, 900

#define threadIdx (::tfla::emulator::self().index)
#define blockIdx (::tfla::emulator::self().cta->block)
// Not macros: launches have members of these names.
using tfla::emulator::blockDim;
using tfla::emulator::gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using dim3 = tfla::emulator::Index;

// What CUDA has outside of any namespace.
using std::isfinite;
using std::max;
using std::min;
inline float min(float a, double b) { return std::fmin(a, static_cast<float>(b)); }
inline std::int64_t min(std::int64_t a, int b) { return std::min<std::int64_t>(a, b); }
inline std::int64_t min(int a, std::int64_t b) { return std::min<std::int64_t>(a, b); }
inline std::int64_t max(std::int64_t a, int b) { return std::max<std::int64_t>(a, b); }
inline std::int64_t max(int a, std::int64_t b) { return std::max<std::int64_t>(a, b); }
inline unsigned min(unsigned a, int b) { return std::min(a, static_cast<unsigned>(b)); }
inline unsigned min(int a, unsigned b) { return std::min(static_cast<unsigned>(a), b); }

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) * b) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float x) { return std::log2(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
inline unsigned atomicAdd(unsigned* to, unsigned x) { return std::exchange(*to, *to + x); }
inline int atomicAdd(int* to, int x) { return std::exchange(*to, *to + x); }

inline void __syncthreads() { tfla::emulator::sync_threads(); }
inline void __syncwarp(unsigned mask = ~0U) { tfla::emulator::meet_warp(mask); }
template <class T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  const int own = static_cast<int>(tfla::emulator::self().lane());
  return tfla::emulator::of_lane(mask, x, own / width * width + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
  const int own = static_cast<int>(tfla::emulator::self().lane()), from = own ^ bits;
  return tfla::emulator::of_lane(mask, x, from < own / width * width + width ? from : own);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32) {
  const int own = static_cast<int>(tfla::emulator::self().lane()), from = own - static_cast<int>(by);
  return tfla::emulator::of_lane(mask, x, from >= own / width * width ? from : own);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32) {
  const int own = static_cast<int>(tfla::emulator::self().lane()), from = own + static_cast<int>(by);
  return tfla::emulator::of_lane(mask, x, from < own / width * width + width ? from : own);
}
inline unsigned __ballot_sync(unsigned mask, bool holds) { return tfla::emulator::ballot(mask, holds); }
inline unsigned __match_any_sync(unsigned mask, std::uint64_t x) { return tfla::emulator::equal_lanes(mask, x); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) { return tfla::emulator::largest(mask, x); }
