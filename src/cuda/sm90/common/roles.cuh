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

// What `Warpgroups` neighbouring warpgroups do, and the registers that each of their threads has for it.
template <int Registers, int Warpgroups, class Work>
struct Role {
  static constexpr int registers = Registers, warpgroups = Warpgroups;
  Work work;
};
template <int Registers, int Warpgroups = 1, class Work>
__device__ __forceinline__ Role<Registers, Warpgroups, Work> role(Work work) {
  return {work};
}

namespace detail {
template <bool First, class Mine, class... Others>
__device__ __forceinline__ void run_roles_from(int warpgroup, const Mine& mine, const Others&... others) {
  if (sizeof...(Others) == 0 || warpgroup < Mine::warpgroups) {
    if constexpr (First)
      arch::fewer_registers<Mine::registers>();
    else
      arch::more_registers<Mine::registers>();
    mine.work();
  } else if constexpr (sizeof...(Others) > 0) {
    run_roles_from<false>(warpgroup - Mine::warpgroups, others...);
  }
}
}  // namespace detail

// Every warpgroup takes the role of its number. The first role loads and stores and gives registers back; the others
// take more.
template <class... Roles>
__device__ __forceinline__ void run_roles(const Roles&... roles) {
  detail::run_roles_from<true>(static_cast<int>(threadIdx.x) / warpgroup_threads, roles...);
}

// A role inside a warpgroup: what one warp does, or one thread of it.
template <bool Alone, class Work>
struct WarpRole {
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

namespace detail {
template <bool Alone, class Work, class... Others>
__device__ __forceinline__ void run_warps_from(int warp, const WarpRole<Alone, Work>& mine, const Others&... others) {
  if (warp == 0) {
    if (!Alone || threadIdx.x % warp_threads == 0) mine.work();
  } else if constexpr (sizeof...(Others) > 0) {
    run_warps_from(warp - 1, others...);
  }
}
}  // namespace detail

// Every warp of the first warpgroup takes the role of its number; warps beyond the last role have none.
template <class... WarpRoles>
__device__ __forceinline__ void run_warps(const WarpRoles&... roles) {
  detail::run_warps_from(static_cast<int>(threadIdx.x) / warp_threads, roles...);
}

// Calls launch(std::true_type) for packed sequences, launch(std::false_type) for a dense batch.
template <class Launch>
void launch_by_packing(const Call<float>& call, const Launch& launch) {
  call.packing.cu_seqlens != nullptr ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace tfla::cuda::sm90
