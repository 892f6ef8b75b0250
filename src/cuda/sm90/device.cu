#include "cuda/launch.h"
#include "cuda/sm90/stages.h"

namespace tfla::cuda::sm90 {

namespace {

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

bool supported_device() {
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9 && attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

}  // namespace tfla::cuda::sm90
