// The stages that have kernels of their own on Hopper. Each launches and returns true, or leaves everything to the
// portable kernels and returns false.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/call.h"
#include "cuda/portable/block_gemm.cuh"

namespace tfla::cuda::sm90 {

// Whether the current GPU runs code for sm_90a.
[[nodiscard]] bool supported_device();
// Of the current GPU.
[[nodiscard]] int multiprocessors();

// dQ, dK, dV and the row sums that launch_gate_gradients reads.
template <class T>
[[nodiscard]] bool launch_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream);

// How often launch_gradients returned true in this process: results do not tell which kernel made them.
[[nodiscard]] std::int64_t gradients_launches();

}  // namespace tfla::cuda::sm90
