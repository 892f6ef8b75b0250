#include "cuda/device.h"

#include <algorithm>
#include <string>

#include "tfla/error.h"

namespace tfla::cuda {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Unavailable(std::string("tfla: CUDA refused ") + call + ": " + cudaGetErrorString(status));
}

void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

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
      .multiprocessors = attribute(cudaDevAttrMultiProcessorCount)};
  return facts;
}

bool runs_sm90_code() {
  constexpr int compiled[] = {__CUDA_ARCH_LIST__};  // 10 times the capability
  const int own = 10 * device_facts().capability;
  int best = 0;
  for (const int code : compiled)
    if (code <= own) best = std::max(best, code);
  return best >= 900;
}

}  // namespace tfla::cuda
