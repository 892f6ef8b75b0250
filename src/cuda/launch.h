// The stages of the CUDA backend, as host functions that launch kernels on a stream and return at once.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "cuda/call.h"
#include "cuda/portable/block_gemm.cuh"
#include "tfla/plan.h"

namespace tfla::cuda {

// Throw Unavailable with the call that failed.
void check(cudaError_t status, const char* call);
void check_launch(const char* kernel);
// Of the current device. Kept from one call to the next, since every call asks for them.
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

// Kernels without dynamic shared memory need no leave for it, and asking costs host time in every call.
template <class Kernel>
void allow_shared(const char* name, Kernel kernel, int shared_bytes) {
  if (shared_bytes == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
}

// Launches a kernel on a one-dimensional grid, with its shared memory allowed for.
template <class Kernel, class... Args>
void launch_blocks(const char* name, Kernel kernel, std::int64_t blocks, int threads, int shared_bytes,
                   cudaStream_t stream, const Args&... args) {
  allow_shared(name, kernel, shared_bytes);
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(args...);
  check_launch(name);
}

// The same for kernels that begin with arch::after_previous_kernel: their blocks may come onto the GPU before the
// kernel before them is done, so that it costs no time to start them. Clusters are of `cluster` blocks.
template <class Kernel, class... Args>
void launch_clusters(const char* name, Kernel kernel, unsigned cluster, std::int64_t blocks, int threads,
                     int shared_bytes, cudaStream_t stream, const Args&... args) {
  allow_shared(name, kernel, shared_bytes);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(blocks), 1, 1};
  config.blockDim = {static_cast<unsigned>(threads), 1, 1};
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !runs_sm90_code() ? 0 : cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), name);
}
// The same without clusters.
template <class Kernel, class... Args>
void launch_chained(const char* name, Kernel kernel, std::int64_t blocks, int threads, int shared_bytes,
                    cudaStream_t stream, const Args&... args) {
  launch_clusters(name, kernel, 1, blocks, threads, shared_bytes, stream, args...);
}
inline constexpr unsigned most_cluster_blocks = 8;  // on every GPU that has clusters

enum class Time { forward, reverse };

template <class Real>
void launch_gates(const Call<Real>& call, cudaStream_t stream);

// T: the type of q, k, v.
template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// What each segment of a sequence adds to the state.
template <class T>
void launch_segment_totals(const Call<typename Config<T>::Real>& call, Time direction, cudaStream_t stream);
// Totals of the segments of a sequence become the states they start from.
template <class T>
void launch_segment_scan(const Call<typename Config<T>::Real>& call, Time direction, cudaStream_t stream);
template <class T>
void launch_grad_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_outputs(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// 1 / den of every row and its slope, from the n that launch_states left at chunk starts.
template <class T>
void launch_denominators(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// deta of every row, with the exact normalizer gradient.
template <class T>
void launch_grad_denominators(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// dQ, dK, dV, and the row sums from which launch_grad_gates makes di and df.
template <class T>
void launch_grad_qkv(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_grad_gates(const Call<typename Config<T>::Real>& call, cudaStream_t stream);

// The states of the recurrent formulation at the first token: the initial state, or zero.
template <class Real>
void launch_start_states(const StepCall<Real>& step, cudaStream_t stream);
// Tokens on states in place, in tiles of so many columns of dhv; by clusters in one launch; one token of each of many
// states.
template <class T>
void launch_step(const StepCall<typename Config<T>::Real>& step, int columns, cudaStream_t stream);
template <class T>
void launch_step_cluster(const StepCall<typename Config<T>::Real>& step, int columns, cudaStream_t stream);
template <class T>
void launch_step_many(const StepCall<float>& step, cudaStream_t stream);

}  // namespace tfla::cuda
