// The current GPU, errors of the CUDA runtime, and launches of kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/arch/launch.h"
#include "tfla/plan.h"

namespace tfla::cuda {

// Throw Unavailable with the call that failed.
void check(cudaError_t status, const char* call);

// Facts of the current device. They are kept from one call to the next, since every call asks for them.
struct DeviceFacts {
  int device = -1;
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a CTA may have
  int code = 0;          // newest architecture that there is code for and the device runs
};
[[nodiscard]] const DeviceFacts& device_facts();
// The same as the plan knows them.
[[nodiscard]] tfla::DeviceFacts current_facts();
// Throws Unavailable in one sentence: no driver, no GPU, or one that is too old.
void check_available();
// Whether this GPU runs code that was compiled for Hopper or newer: clusters, and kernels that start early.
[[nodiscard]] bool runs_sm90_code();

// Raises a kernel's limit of dynamic shared memory. Kernels without any skip the call, which costs host time.
template <class Kernel>
void allow_shared(const char* name, Kernel kernel, int shared_bytes) {
  if (shared_bytes == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
}

// CTAs of a one-dimensional grid.
[[nodiscard]] inline cudaLaunchConfig_t launch_config(std::int64_t blocks, int threads, int shared_bytes,
                                                      cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(blocks), 1, 1};
  config.blockDim = {static_cast<unsigned>(threads), 1, 1};
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  return config;
}

// Launches a kernel on a one-dimensional grid.
template <class Kernel, class... Args>
void launch_blocks(const char* name, Kernel kernel, std::int64_t blocks, int threads, int shared_bytes,
                   cudaStream_t stream, const Args&... args) {
  allow_shared(name, kernel, shared_bytes);
  check(arch::launch(name, launch_config(blocks, threads, shared_bytes, stream), kernel, args...), name);
}

// Launches a kernel that begins with arch::after_previous_kernel, in clusters of `cluster` CTAs. Its CTAs may come onto
// the GPU before the previous kernel is done, which hides the time of the launch.
template <class Kernel, class... Args>
void launch_clusters(const char* name, Kernel kernel, unsigned cluster, std::int64_t blocks, int threads,
                     int shared_bytes, cudaStream_t stream, const Args&... args) {
  allow_shared(name, kernel, shared_bytes);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = launch_config(blocks, threads, shared_bytes, stream);
  config.attrs = attributes;
  config.numAttrs = !runs_sm90_code() ? 0 : cluster > 1 ? 2 : 1;
  check(arch::launch(name, config, kernel, args...), name);
}
// The same without clusters.
template <class Kernel, class... Args>
void launch_chained(const char* name, Kernel kernel, std::int64_t blocks, int threads, int shared_bytes,
                    cudaStream_t stream, const Args&... args) {
  launch_clusters(name, kernel, 1, blocks, threads, shared_bytes, stream, args...);
}
inline constexpr unsigned most_cluster_blocks = 8;  // CTAs of a cluster, on every GPU that has clusters

}  // namespace tfla::cuda
