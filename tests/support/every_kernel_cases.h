// Cases that launch every CUDA kernel between them, and are small: compute-sanitizer runs them (tools/gpu_sanitize.sh),
// under which a kernel takes a hundred times as long. That they do is tested on any machine (kernel_table_test.cc).
#pragma once

#include <cstdint>
#include <vector>

#include "testkit/case.h"

namespace tfla::test {

enum class Kernels : std::uint8_t { hopper, portable };

struct SmallCase {
  testkit::Case c;
  Kernels kernels = Kernels::hopper;
  bool norms = false;     // a gradient of the last n
  bool segments = false;  // the sequence is to be cut
};

[[nodiscard]] std::vector<SmallCase> small_cases();

}  // namespace tfla::test
