// Backward in slices of heads, as the CUDA backend works through them, by the CPU's kernels.
#include "cuda/slice.h"

#include <gtest/gtest.h>

#include "tests/support/support.h"

namespace tfla::test {
namespace {

using testkit::Case;
using testkit::Layout;
using testkit::Problem;

TEST(SliceSmall, SlicesOfHeadsMakeUpTheWhole) {
  for (const Layout layout : {Layout::bthd, Layout::bhtd, Layout::fused}) {
    for (const std::int64_t group : {1, 3}) {
      Case c;
      c.shape = {.batch = 2, .tokens = 40, .qk_heads = 5, .heads = 5 * group, .dqk = 4, .dhv = 6};
      c.options.exact_normalizer_grad = true;
      c.layout = layout;
      c.initial_state = c.last_state_grad = true;
      Problem problem(c);
      const Snapshot whole = run_backward(problem);
      for (const std::int64_t slices : {1, 2, 3, 5}) {
        problem.poison();
        Plan sliced = plan(problem.backward());
        sliced.slices = slices;
        std::int64_t heads = 0, calls = 0;
        cuda::each_slice(sliced, [&](const cuda::Slice& slice) {
          EXPECT_EQ(slice.of(sliced).shape, plan(slice.of(problem.backward())).shape);
          backward(slice.of(problem.backward()));
          heads += slice.count;
          ++calls;
        });
        EXPECT_EQ(heads, 5);
        EXPECT_LE(calls, slices);
        EXPECT_TRUE(same_bits(snapshot(problem.backward()), whole)) << label(c) << ", slices " << slices;
      }
    }
  }
}

}  // namespace
}  // namespace tfla::test
