// What tests of the CUDA backend share.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/support/support.h"

namespace tfla::test {

inline constexpr Execution on_gpu{.device = Device::cuda};

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  }
};

[[nodiscard]] inline testkit::Case gpu_case(const MlstmShape& shape) {
  testkit::Case c;
  c.regime = reference::Regime::trained_like;
  c.shape = shape;
  c.device = Device::cuda;
  return c;
}

// Runs a case against the reference, on the kernels of Hopper. prepare changes its inputs. dn_last: where there is a
// gradient of the last state, one of n too, which takes other kernels. Returns the plan of forward.
Plan check_on_hopper(const testkit::Case& c, bool gradients, const std::function<void(testkit::Problem&)>& prepare = {},
                     bool dn_last = false);

}  // namespace tfla::test
