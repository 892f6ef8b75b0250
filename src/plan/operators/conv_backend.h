// The convolution of the CPU, as the API sees it.
#pragma once

#include <cstddef>

#include "tfla/conv.h"

namespace tfla {

struct ConvBackend {
  void (*forward)(const ConvForward& args, const ConvPlan& plan, std::byte* scratch);
  void (*backward)(const ConvBackward& args, const ConvPlan& plan, std::byte* scratch);
  void (*step)(const ConvStep& args, const ConvPlan& plan, std::byte* scratch);
};

[[nodiscard]] const ConvBackend& cpu_conv_backend();
[[nodiscard]] std::size_t cpu_scratch_bytes(const ConvPlan& plan);

}  // namespace tfla
