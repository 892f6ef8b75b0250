// What tests of the CUDA backend share.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "plan/cuda_plan.h"
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

[[nodiscard]] inline bool on_hopper(const Plan& plan, Kernel kernel) { return launches(plan, kernel, Needs::sm90a); }
// dQ, dK and dV by Hopper's kernels.
[[nodiscard]] inline bool has_hopper_gradients(const Plan& plan) {
  return on_hopper(plan, Kernel::grad_qkv) || on_hopper(plan, Kernel::grad_qkv_small) ||
         on_hopper(plan, Kernel::grad_qk) || on_hopper(plan, Kernel::grad_qk_norm) ||
         on_hopper(plan, Kernel::grad_k_reverse);
}

// Runs a case against the reference, on the kernels of Hopper. prepare changes its inputs. dn_last: where there is a
// gradient of the last state, one of n too, which takes other kernels. Returns the plan of forward.
Plan check_on_hopper(const testkit::Case& c, const std::function<void(testkit::Problem&)>& prepare = {},
                     bool dn_last = false);

}  // namespace tfla::test
