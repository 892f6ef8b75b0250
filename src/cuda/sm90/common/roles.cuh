// What all kernels of Hopper with roles have in common: how they begin, and how their warpgroups and warps part.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/cluster.cuh"
#include "cuda/sm90/common/limits.h"

namespace tfla::cuda::sm90 {

// Before the roles part: one thread makes the barriers, which all may use from here on, as they may what kernels before
// this one wrote.
template <class InitBarriers>
__device__ __forceinline__ void begin_kernel(const InitBarriers& init_barriers) {
  if (threadIdx.x == 0) {
    init_barriers();
    arch::barriers_ready();
  }
  __syncthreads();
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
}

// The argument of that number.
template <int Number, class First, class... Others>
__device__ __forceinline__ const auto& nth(const First& first, const Others&... others) {
  if constexpr (Number == 0)
    return first;
  else
    return nth<Number - 1>(others...);
}
// Calls run with `number` as a constant; numbers from Count on do nothing.
template <int Count, class Run>
__device__ __forceinline__ void by_number(std::uint8_t number, const Run& run) {
  static_assert(Count <= 4);
  const auto run_below_count = [&]<int Number>(std::integral_constant<int, Number> constant) {
    if constexpr (Number < Count) run(constant);
  };
  switch (number) {
    case 0: run_below_count(std::integral_constant<int, 0>{}); break;
    case 1: run_below_count(std::integral_constant<int, 1>{}); break;
    case 2: run_below_count(std::integral_constant<int, 2>{}); break;
    case 3: run_below_count(std::integral_constant<int, 3>{}); break;
    default: break;
  }
}

// What a warpgroup does, and how many registers each of its threads has for it.
template <int Registers, class Work>
struct Role {
  static constexpr int registers = Registers;
  Work work;
};
template <int Registers, class Work>
__device__ __forceinline__ Role<Registers, Work> role(Work work) {
  return {work};
}
// Every warpgroup of a CTA takes the role of its number. The first one loads and stores: it gives registers back. The
// others take them.
template <class... Roles>
__device__ __forceinline__ void run_roles(const Roles&... roles) {
  by_number<sizeof...(Roles)>(static_cast<std::uint8_t>(threadIdx.x / warpgroup_threads), [&](auto number) {
    const auto& mine = nth<number.value>(roles...);
    if constexpr (number.value == 0)
      arch::fewer_registers<std::decay_t<decltype(mine)>::registers>();
    else
      arch::more_registers<std::decay_t<decltype(mine)>::registers>();
    mine.work();
  });
}

// What a warp does, or one thread of it.
template <bool Alone, class Work>
struct WarpRole {
  static constexpr bool alone = Alone;
  Work work;
};
template <class Work>
__device__ __forceinline__ WarpRole<false, Work> whole_warp(Work work) {
  return {work};
}
template <class Work>
__device__ __forceinline__ WarpRole<true, Work> one_thread(Work work) {
  return {work};
}
// Every warp of the first warpgroup takes the role of its number.
template <class... WarpRoles>
__device__ __forceinline__ void run_warps(const WarpRoles&... roles) {
  const bool first_lane = threadIdx.x % warp_threads == 0;
  by_number<sizeof...(WarpRoles)>(static_cast<std::uint8_t>(threadIdx.x / warp_threads), [&](auto number) {
    const auto& mine = nth<number.value>(roles...);
    if (!std::decay_t<decltype(mine)>::alone || first_lane) mine.work();
  });
}

// Calls launch(std::true_type) for packed sequences, launch(std::false_type) for a dense batch.
template <class Launch>
void launch_by_packing(const Call<float>& call, const Launch& launch) {
  call.packing.cu_seqlens != nullptr ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace tfla::cuda::sm90
