// The convolution of a backend, as the API sees it.
#pragma once

#include <cstddef>

#include "tfla/conv.h"

namespace tfla {

struct ConvBackend {
  void (*forward)(const ConvForward& args, const ConvPlan& plan, std::byte* scratch, void* stream);
  void (*backward)(const ConvBackward& args, const ConvPlan& plan, std::byte* scratch, void* stream);
  void (*step)(const ConvStep& args, const ConvPlan& plan, std::byte* scratch, void* stream);
};

[[nodiscard]] const ConvBackend& cpu_conv_backend();
[[nodiscard]] const ConvBackend* cuda_conv_backend();  // null in a build without CUDA
[[nodiscard]] std::size_t cpu_scratch_bytes(const ConvPlan& plan);

}  // namespace tfla
