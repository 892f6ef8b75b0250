// Memory of the GPU for tests in which the test kit, whose buffers the host can read, would be too slow or too small.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tfla::test {

// `data` is null where there is not enough.
struct DeviceMemory {
  void* data = nullptr;
  explicit DeviceMemory(std::int64_t bytes) {
    if (cudaMalloc(&data, static_cast<std::size_t>(bytes)) != cudaSuccess) data = nullptr;
    cudaGetLastError();
  }
  ~DeviceMemory() { cudaFree(data); }
  DeviceMemory(DeviceMemory&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
};

}  // namespace tfla::test
