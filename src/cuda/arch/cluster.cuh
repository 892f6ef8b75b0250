// Barriers of clusters, and kernels that start before the previous one is done (sm_90 and newer). Kernels that use them
// are compiled for older GPUs too, and never launched there.
#pragma once

namespace tfla::cuda::arch {

// What this thread did before is seen by the others of the cluster after their wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The same, without making what was written before visible.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A number in shared memory, as the CTA with this rank in the cluster has it. That CTA must not end meanwhile.
__device__ __forceinline__ double read_from_cta(const double& own, unsigned cta) {
  double value = own;
#if __CUDA_ARCH__ >= 900
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&own))), "r"(cta));
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(there) : "memory");
#endif
  return value;
}

// Kernels of launch_chained: waits until the kernels before this one are done and what they wrote can be read.
__device__ __forceinline__ void after_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may come onto the GPU, where it waits.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tfla::cuda::arch
