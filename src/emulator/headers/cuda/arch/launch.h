// In the place of cuda/arch/launch.h.
#pragma once

#include <cuda_runtime.h>

namespace tfla::cuda::arch {

template <class... Wanted, class... Args>
cudaError_t launch(const char* name, const cudaLaunchConfig_t& config, void (*kernel)(Wanted...), const Args&... args) {
  emulator::enqueue_kernel<Wanted...>(config, name, kernel, {args...});
  return cudaSuccess;
}

}  // namespace tfla::cuda::arch
