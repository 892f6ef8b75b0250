// What the kernels know of an element type T of q, k, v: bfloat16, float16, float32 or float64.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace tfla::cuda {

// TFLA_FOR_EACH_TYPE(make) is make(T) for every element type; `make` is a macro without its last semicolon.
#define TFLA_FOR_EACH_TYPE(make) \
  make(__nv_bfloat16);           \
  make(__half);                  \
  make(float);                   \
  make(double)

template <class T>
inline constexpr bool is_16_bit = sizeof(T) == 2;

template <class T>
struct Config {
  // Products run on the tensor cores with float32 sums; others are ordinary multiply-adds.
  static constexpr bool tensor_cores = is_16_bit<T>;
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;  // sums, gates, saved denominators
  using Stored = std::conditional_t<is_16_bit<T>, __nv_bfloat16, T>;          // C and dC: float16 would overflow
  using Norm = std::conditional_t<is_16_bit<T>, float, double>;  // n: q.n cancels, and float32 results show it
  static constexpr int sum_terms = is_16_bit<T> ? 1 : 2;         // numbers that add up to a sum of S . dS

  // Tiles of the portable kernels.
  static constexpr int slab = is_16_bit<T> ? 64 : sizeof(T) == 4 ? 32 : 16;  // depth of one shared-memory tile
  static constexpr int width = is_16_bit<T> ? 128 : 64;                      // columns of an output tile
  static constexpr int pad = 16 / sizeof(T);                                 // keeps rows off each other's banks
  static constexpr int blocks = is_16_bit<T> ? 3 : sizeof(T) == 4 ? 2 : 1;   // CTAs per multiprocessor
};

template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else
    return static_cast<float>(x);
}

template <class Real, class T>
__device__ __forceinline__ Real widen(T x) {
  if constexpr (is_16_bit<T>)
    return to_float(x);
  else
    return static_cast<Real>(x);
}

template <class T, class Real>
__device__ __forceinline__ T narrow(Real x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

}  // namespace tfla::cuda
