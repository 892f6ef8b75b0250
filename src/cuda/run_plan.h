// What the functions that run the launches of a plan have in common.
#pragma once

#include "cuda/common/types.h"
#include "cuda/device.h"
#include "tfla/error.h"
#include "tfla/tensor_view.h"

namespace tfla::cuda {

// Calls work(T{}) for the type T of the kernels.
template <class Work>
void with_type(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::bfloat16: work(__nv_bfloat16{}); break;
    case DType::float16: work(__half{}); break;
    case DType::float64: work(double{}); break;
    default: work(float{}); break;
  }
}

// planned: the GPU that the plan was made for.
inline void check_gpu(const tfla::DeviceFacts& planned) {
  if (planned != current_facts())
    throw InvalidArgument("tfla: plan was made for another GPU; plan these arguments again");
}

[[noreturn]] inline void refuse_launch() {
  throw InvalidArgument("tfla: plan has a launch that this build does not know; plan these arguments again");
}

}  // namespace tfla::cuda
