// How a kernel is launched.
#pragma once

#include <cuda_runtime.h>

namespace tfla::cuda::arch {

// name: for messages.
template <class Kernel, class... Args>
cudaError_t launch(const char* /*name*/, const cudaLaunchConfig_t& config, Kernel kernel, const Args&... args) {
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace tfla::cuda::arch
