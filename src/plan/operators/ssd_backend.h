// The state space dual of a backend, as the API sees it.
#pragma once

#include <cstddef>

#include "tfla/ssd.h"

namespace tfla {

struct SsdBackend {
  void (*forward)(const SsdForward& args, const SsdPlan& plan, std::byte* scratch, void* stream);
  void (*backward)(const SsdBackward& args, const SsdPlan& plan, std::byte* scratch, void* stream);
  void (*step)(const SsdStep& args, const SsdPlan& plan, std::byte* scratch, void* stream);
};

[[nodiscard]] const SsdBackend& cpu_ssd_backend();
[[nodiscard]] const SsdBackend* cuda_ssd_backend();  // null in a build without CUDA
[[nodiscard]] std::size_t cpu_scratch_bytes(const SsdPlan& plan);

}  // namespace tfla
