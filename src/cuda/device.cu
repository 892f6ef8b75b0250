#include "cuda/device.h"

#include <algorithm>
#include <string>

#include "tfla/error.h"

namespace tfla::cuda {

namespace {

constexpr int oldest_capability = 80;  // Ampere

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Unavailable(std::string("tfla: CUDA refused ") + call + ": " + cudaGetErrorString(status));
}

const DeviceFacts& device_facts() {
  thread_local DeviceFacts facts;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device == facts.device) return facts;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  facts = {
      .device = device,
      .capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
      .multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
      .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
  constexpr int compiled[] = {__CUDA_ARCH_LIST__};  // 10 times the capability
  for (const int code : compiled)
    if (code <= 10 * facts.capability) facts.code = std::max(facts.code, code / 10);
  return facts;
}

bool runs_sm90_code() { return device_facts().code >= 90; }

tfla::DeviceFacts current_facts() {
  const DeviceFacts& own = device_facts();
  return {.capability = own.capability,
          .multiprocessors = own.multiprocessors,
          .shared_bytes = own.shared_bytes,
          .code = own.code == own.capability ? 0 : own.code};
}

void check_available() {
  thread_local int available = -1;  // the device that was found to be, last
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess && device == available) return;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    throw Unavailable(std::string("tfla: no GPU can be used here (") +
                      (status == cudaSuccess ? "none was found" : cudaGetErrorString(status)) +
                      "); use the device cpu");
  }
  const int own = device_facts().capability;
  if (own < oldest_capability) {
    throw Unavailable("tfla: the GPU has compute capability " + std::to_string(own / 10) + "." +
                      std::to_string(own % 10) + "; 8.0 or newer is needed");
  }
  available = device;
}

}  // namespace tfla::cuda
