// Every CUDA kernel against the reference.
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "plan/backend.h"
#include "tests/cuda/on_gpu.h"
#include "tests/support/every_kernel_cases.h"

namespace tfla::test {

void PrintTo(const SmallCase& small, std::ostream* out) { *out << label(small.c); }

namespace {

using testkit::Case;

class EveryKernel : public ::testing::TestWithParam<SmallCase> {};

TEST_P(EveryKernel, WithinBounds) {
  if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  const SmallCase& small = GetParam();
  const Case& c = small.c;
  if (small.kernels == Kernels::hopper) {
    if (backend(Device::cuda).facts().capability != 90) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
    EXPECT_EQ(check_on_hopper(c, {}, small.norms).segments > 1, small.segments);
    return;
  }
  const Execution portable{.device = Device::cuda, .portable = true};
  const bool with_backward = c.options.formulation != Formulation::recurrent;
  testkit::Problem problem(c);
  const testkit::Judge judge(problem, with_backward);
  forward(problem.forward(), portable);
  EXPECT_TRUE(within_bounds(judge.forward_errors(), c));
  if (!with_backward) return;
  backward(problem.backward(), portable);
  EXPECT_TRUE(within_bounds(judge.backward_errors(), c));
}

INSTANTIATE_TEST_SUITE_P(Cuda, EveryKernel, ::testing::ValuesIn(small_cases()),
                         [](const auto& test) { return std::to_string(test.index) + "_" + label(test.param.c); });

}  // namespace
}  // namespace tfla::test
