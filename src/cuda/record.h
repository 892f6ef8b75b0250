// Instruments of tests and benchmarks: see plan/backend.h.
#pragma once

#include "plan/backend.h"

namespace tfla::cuda {

[[nodiscard]] std::unique_ptr<Recording> record(const std::function<void(void* stream)>& calls);
void copy(void* to, const void* from, std::size_t bytes);
void copy_on(void* stream, void* to, const void* from, std::size_t bytes);
[[nodiscard]] std::string device_name();

}  // namespace tfla::cuda
