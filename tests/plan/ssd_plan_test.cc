// What is chosen for the state space dual, call by call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "plan/operators/ssd_cuda.h"
#include "tfla/tfla.h"

namespace tfla::test {
namespace {

MlstmShape shape_of(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t P, std::int64_t S) {
  return {.batch = batch,
          .tokens = tokens,
          .qk_heads = 1,
          .heads = heads,
          .dqk = S,
          .dhv = P,
          .sequences = batch,
          .longest = tokens};
}

TEST(SsdPlanSmall, TheScanIsAnMlstmWithoutDenominator) {
  for (const Operation operation : {Operation::forward, Operation::backward}) {
    const MlstmShape shape = shape_of(2, 1000, 8, 64, 128);
    const SsdPlan plan = ssd_plan(operation, shape, {.chunk_size = 100}, {.threads = 3});
    EXPECT_EQ(plan.operation, operation);
    EXPECT_EQ(plan.options.chunk_size, 100);
    EXPECT_EQ(plan.scan.shape, shape);
    EXPECT_EQ(plan.scan.options.gate, InputGate::log);
    EXPECT_EQ(plan.scan.options.qk_scale, 1.0);
    EXPECT_EQ(plan.threads, 3);
    EXPECT_GE(plan.scratch_bytes, plan.scan.scratch_bytes);
  }
}

TEST(SsdPlanSmall, PanelsOfAStep) {
  const struct {
    std::int64_t batch, heads, P;
    int threads;
    std::int64_t panel;
  } rows[] = {{1, 8, 64, 2, 64}, {1, 8, 64, 4, 64},                    // twice as many heads as threads
              {1, 8, 64, 8, 32}, {1, 1, 64, 2, 16}, {1, 1, 64, 8, 8},  // 8 rows at least
              {1, 1, 5, 8, 5},   {4, 2, 64, 4, 64}, {2, 1, 100, 2, 50}};
  for (const auto& row : rows) {
    const SsdPlan plan =
        ssd_plan(Operation::step, shape_of(row.batch, 1, row.heads, row.P, 128), {}, {.threads = row.threads});
    EXPECT_EQ(plan.panel, row.panel) << describe(plan);
    EXPECT_LE(plan.threads, row.threads) << describe(plan);
  }
  EXPECT_GT(ssd_plan(Operation::step, shape_of(0, 1, 2, 64, 16), {}).panel, 0);
}

TEST(SsdPlanSmall, DescribeNamesTheOperatorAndTheScan) {
  const MlstmShape shape = shape_of(1, 256, 4, 64, 128);
  for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
    const SsdPlan plan = ssd_plan(operation, shape, {}, {.threads = 2});
    const std::string page = describe(plan);
    EXPECT_NE(page.find("state space dual"), std::string::npos) << page;
    EXPECT_NE(page.find(describe(plan.scan)), std::string::npos) << page;
    EXPECT_EQ(page.find("panel") != std::string::npos, operation == Operation::step) << page;
  }
}

TEST(SsdPlanSmall, ScratchGrowsWithThreadsThatHaveWork) {
  const MlstmShape shape = shape_of(1, 500, 4, 64, 64);
  for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
    const std::size_t one = ssd_plan(operation, shape, {}, {.threads = 1}).scratch_bytes;
    EXPECT_GT(one, 0U);
    EXPECT_GT(ssd_plan(operation, shape, {}, {.threads = 3}).scratch_bytes, one);
  }
}

TEST(SsdPlanSmall, SizesThatDoNotFitAreRefused) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
    MlstmShape packed = shape_of(1, 8, 2, 4, 4);
    packed.packed = true;
    packed.sequences = most;
    EXPECT_THROW((void)ssd_plan(operation, shape_of(1, 1, 1, 8, 1LL << 31), {}), InvalidArgument);
    try {
      (void)ssd_plan(operation, packed, {});
      ADD_FAILURE() << "not refused";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("sequences of 2 heads; their states do not fit in memory"),
                std::string::npos)
          << error.what();
    }
  }
}

// From a shape alone a call on a GPU has all optional tensors.
TEST(SsdPlanSmall, LaunchesOnAGpu) {
  using enum SsdKernel;
  const Execution execution{
      .device = Device::cuda, .portable = true, .untested = true, .gpu = known_gpus().front().facts};
  const MlstmShape shape = shape_of(2, 1000, 8, 64, 128);
  const struct {
    Operation operation;
    std::vector<SsdKernel> launches;
  } rows[] = {
      {Operation::forward, {turn_states, time_steps, scan, epilogue, turn_back}},
      {Operation::backward,
       {turn_states, time_steps, epilogue_gradients, scan, skip_gradients, time_step_gradients, sum_tokens, turn_back}},
      {Operation::step, {step}}};
  for (const auto& row : rows) {
    const SsdPlan plan = ssd_plan(row.operation, shape, {}, execution);
    const std::string page = describe(plan);
    ASSERT_EQ(plan.launches.size(), row.launches.size()) << page;
    for (std::size_t at = 0; at < row.launches.size(); ++at) {
      EXPECT_EQ(plan.launches[at].kernel, static_cast<std::uint8_t>(row.launches[at])) << page;
      EXPECT_NE(page.find(name(row.launches[at])), std::string::npos) << page;
    }
    EXPECT_GE(plan.scratch_bytes, plan.scan.scratch_bytes) << page;
    EXPECT_EQ(plan.scratch_bytes > 0, row.operation != Operation::step) << page;
    EXPECT_EQ(plan.scan.launches.size() > 0, row.operation != Operation::step) << page;
  }
}

// D x and silu(z) are part of Hopper's forward where a kernel is compiled for that, and a launch of their own
// elsewhere.
TEST(SsdPlanSmall, TheEpilogueIsPartOfTheScanWhereItCanBe) {
  const struct {
    DType dtype;
    std::int64_t P, S;
    int capability;
    bool portable, fused;
  } rows[] = {{DType::bfloat16, 64, 128, 90, false, true}, {DType::bfloat16, 128, 128, 90, false, true},
              {DType::bfloat16, 200, 64, 90, false, true}, {DType::bfloat16, 64, 136, 90, false, false},
              {DType::float16, 64, 128, 90, false, false}, {DType::float32, 64, 128, 90, false, false},
              {DType::bfloat16, 64, 128, 90, true, false}, {DType::bfloat16, 64, 128, 80, false, false},
              {DType::bfloat16, 64, 100, 90, false, false}};
  for (const auto& row : rows) {
    Execution execution{.device = Device::cuda, .portable = row.portable, .untested = true};
    for (const KnownGpu& gpu : known_gpus())
      if (gpu.facts.capability == row.capability) execution.gpu = gpu.facts;
    for (const bool packed : {false, true}) {
      MlstmShape shape = shape_of(2, 1000, 8, row.P, row.S);
      shape.dtype = row.dtype;
      shape.packed = packed;
      const SsdPlan plan = ssd_plan(Operation::forward, shape, {}, execution);
      const std::string page = describe(plan);
      EXPECT_EQ(has_fused_epilogue(plan), row.fused) << page;
      EXPECT_EQ(page.find("with D x and silu(z)") != std::string::npos, row.fused) << page;
      const bool has_launch = std::any_of(plan.launches.begin(), plan.launches.end(), [](const Launch& launch) {
        return launch.kernel == static_cast<std::uint8_t>(SsdKernel::epilogue);
      });
      EXPECT_EQ(has_launch, !row.fused) << page;
      EXPECT_FALSE(has_fused_epilogue(ssd_plan(Operation::backward, shape, {}, execution))) << page;
    }
  }
}

}  // namespace
}  // namespace tfla::test
