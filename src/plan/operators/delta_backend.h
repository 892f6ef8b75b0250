// The delta rule of a backend, as the API sees it.
#pragma once

#include <cstddef>

#include "tfla/delta.h"

namespace tfla {

struct DeltaBackend {
  void (*forward)(const DeltaForward& args, const DeltaPlan& plan, std::byte* scratch, void* stream);
  void (*backward)(const DeltaBackward& args, const DeltaPlan& plan, std::byte* scratch, void* stream);
  void (*step)(const DeltaStep& args, const DeltaPlan& plan, std::byte* scratch, void* stream);
};

[[nodiscard]] const DeltaBackend& cpu_delta_backend();
[[nodiscard]] const DeltaBackend* cuda_delta_backend();  // null in a build without CUDA
[[nodiscard]] std::size_t cpu_scratch_bytes(const DeltaPlan& plan);

}  // namespace tfla
