// Copies of boxes of a tensor between global and shared memory by the tensor memory accelerator (sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tfla::cuda::arch {

// What this thread wrote to shared memory is seen by copies and products that follow.
__device__ __forceinline__ void writes_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A box at (column, token, head, batch), or (column, row, matrix); `barrier` counts its bytes. Outside of the tensor:
// zeros.
__device__ __forceinline__ void load_box(unsigned shared, const CUtensorMap* tensor, unsigned barrier, int column,
                                         int token, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(tensor), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}
// The same into the second-level cache alone.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* tensor, int column, int token, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(tensor), "r"(column),
               "r"(token), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void load_box(unsigned shared, const CUtensorMap* tensor, unsigned barrier, int column,
                                         int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(tensor), "r"(barrier), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// The other way; what lies outside of the tensor is not written.
__device__ __forceinline__ void store_box(unsigned shared, const CUtensorMap* tensor, int column, int token, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(tensor),
               "r"(shared), "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void store_box(unsigned shared, const CUtensorMap* tensor, int column, int row, int matrix) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(tensor),
               "r"(shared), "r"(column), "r"(row), "r"(matrix)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `Pending` groups of stores still read shared memory, or are not yet in global memory.
template <int Pending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
template <int Pending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace tfla::cuda::arch
