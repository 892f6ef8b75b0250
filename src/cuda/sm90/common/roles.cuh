// The skeleton of kernels with roles: how they begin, and how their warpgroups and warps find their roles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/cluster.cuh"
#include "cuda/sm90/common/limits.h"

namespace tfla::cuda::sm90 {

// How a kernel begins: one thread makes the barriers. After it all threads may use them, and read what kernels before
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

// Roles are functions of the kernel's tensor maps, its work and the address of its shared memory. They are template
// arguments and not lambdas: the compiler keeps what lambdas capture by reference in memory for longer, and then orders
// instructions otherwise.

// What a warpgroup does, and how many registers each of its threads has for it.
template <int Registers, auto Function>
struct Role {
  static constexpr int registers = Registers;
  static constexpr auto run = Function;
};
// Every warpgroup of a CTA takes the role of its number. The first one loads and stores: it gives registers back. The
// two math warpgroups take them.
template <class LoadStore, class Math0, class Math1, class Maps, class Work>
__device__ __forceinline__ void run_roles(const Maps& maps, const Work& work, unsigned memory) {
  switch (static_cast<std::uint8_t>(threadIdx.x / warpgroup_threads)) {
    case 0:
      arch::fewer_registers<LoadStore::registers>();
      LoadStore::run(maps, work, memory);
      break;
    case 1:
      arch::more_registers<Math0::registers>();
      Math0::run(maps, work, memory);
      break;
    case 2:
      arch::more_registers<Math1::registers>();
      Math1::run(maps, work, memory);
      break;
    default: break;
  }
}

// What a warp of the first warpgroup does, or one thread of it.
template <auto Function>
struct WholeWarp {
  template <class Maps, class Work>
  __device__ __forceinline__ static void run(bool /*first_lane*/, const Maps& maps, const Work& work, unsigned memory) {
    Function(maps, work, memory);
  }
};
template <auto Function>
struct OneThread {
  template <class Maps, class Work>
  __device__ __forceinline__ static void run(bool first_lane, const Maps& maps, const Work& work, unsigned memory) {
    if (first_lane) Function(maps, work, memory);
  }
};
struct Idle {
  template <class Maps, class Work>
  __device__ static void run(bool /*first_lane*/, const Maps& /*maps*/, const Work& /*work*/, unsigned /*memory*/) {}
};
// Every warp of the first warpgroup takes the role of its number.
template <class Warp0, class Warp1, class Warp2, class Warp3 = Idle, class Maps, class Work>
__device__ __forceinline__ void run_warps(const Maps& maps, const Work& work, unsigned memory) {
  const bool first_lane = threadIdx.x % warp_threads == 0;
  switch (static_cast<std::uint8_t>(threadIdx.x / warp_threads)) {
    case 0: Warp0::run(first_lane, maps, work, memory); break;
    case 1: Warp1::run(first_lane, maps, work, memory); break;
    case 2: Warp2::run(first_lane, maps, work, memory); break;
    case 3: Warp3::run(first_lane, maps, work, memory); break;
    default: break;
  }
}

// Calls launch(std::true_type) for packed sequences, launch(std::false_type) for a dense batch.
template <class Launch>
void launch_by_packing(const Call<float>& call, const Launch& launch) {
  call.packing.cu_seqlens != nullptr ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace tfla::cuda::sm90
