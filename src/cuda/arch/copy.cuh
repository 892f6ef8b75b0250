// Asynchronous copies from global to shared memory (sm_80 and newer).
#pragma once

#include <cstdint>

namespace tfla::cuda::arch {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, of which the first `valid` are read and the rest is zero.
__device__ __forceinline__ void copy_16(void* shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n"); }

// Waits until at most `Pending` of this thread's groups are in flight.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending));
}

}  // namespace tfla::cuda::arch
