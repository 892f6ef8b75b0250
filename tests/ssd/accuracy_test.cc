// Errors of the state space dual against the float64 reference: dtypes x options x shapes x packings x chunk sizes x
// layouts, and the regimes that strain the arithmetic.
#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "plan/backend.h"
#include "plan/cuda_plan.h"
#include "plan/operators/ssd_cuda.h"
#include "tests/ssd/cases.h"

namespace tfla::test {
namespace {

class SsdAccuracy : public ::testing::TestWithParam<SsdCase> {};

TEST_P(SsdAccuracy, WithinBounds) {
  if (const std::string reason = why_unavailable(GetParam().device); !reason.empty()) GTEST_SKIP() << reason;
  if (!GetParam().portable && backend(Device::cuda).facts().capability != 90)
    GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  SsdProblem problem(GetParam());
  if (!GetParam().portable) {
    const SsdPlan plan = ssd_plan(problem.forward, execution_of(GetParam()));
    EXPECT_TRUE(runs_on_hopper(plan.scan)) << describe(plan);
    EXPECT_EQ(has_fused_epilogue(plan), GetParam().shape.dtype == DType::bfloat16) << describe(plan);
  }
  const SsdJudge judge(problem);
  EXPECT_TRUE(judge.within_bounds(run_forward(problem)));
  EXPECT_TRUE(problem.surroundings_intact());
  EXPECT_TRUE(judge.within_bounds(run_backward(problem)));
  EXPECT_TRUE(problem.surroundings_intact());
}

class SsdStepAccuracy : public ::testing::TestWithParam<SsdCase> {};

// One token after another in one call, and T calls of one token.
TEST_P(SsdStepAccuracy, WithinBounds) {
  const SsdCase& c = GetParam();
  if (const std::string reason = why_unavailable(c.device); !reason.empty()) GTEST_SKIP() << reason;
  SsdProblem problem(c);
  const SsdJudge judge(problem);
  const SsdStep whole = problem.step(problem.forward.last_state);
  ssd_step(whole, execution_of(c));
  EXPECT_TRUE(judge.within_bounds(snapshot(outputs(whole))));
  EXPECT_TRUE(problem.surroundings_intact());
  problem.poison_forward();
  for (std::int64_t t = 0; t < c.shape.tokens; ++t) {
    SsdStep one = whole;
    for (TensorView* view : {&one.x, &one.dt, &one.B, &one.C, &one.z}) *view = slice(*view, 1, t, 1);
    one.y = slice(one.y, 1, t, 1);
    ssd_step(one, execution_of(c));
  }
  EXPECT_TRUE(judge.within_bounds(snapshot(outputs(whole))));
  EXPECT_TRUE(problem.surroundings_intact());
}

// Step has neither packed sequences nor numbers of them, and its state, contiguous in S, is the first and the last one.
std::vector<SsdCase> for_step(std::vector<SsdCase> all) {
  std::erase_if(all, [](const SsdCase& c) { return !c.cu_seqlens.empty(); });
  for (SsdCase& c : all) {
    c.initial_state = c.in_place = c.last_state = true;
    c.turned_states = false;
    c.seq_idx = testkit::Numbers::none;
  }
  return all;
}

#ifdef TFLA_TEST_CUDA
// The same tables on a GPU.
std::vector<SsdCase> on_cuda(std::vector<SsdCase> all) {
  for (SsdCase& c : all) c.device = Device::cuda;
  return all;
}

INSTANTIATE_TEST_SUITE_P(CudaPairs, SsdAccuracy, ::testing::ValuesIn(on_cuda(ssd_pairs(SsdTable::full))),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaSmall, SsdAccuracy, ::testing::ValuesIn(on_cuda(ssd_pairs(SsdTable::few))), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaHopperSmall, SsdAccuracy, ::testing::ValuesIn(on_cuda(ssd_hopper_cases())), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaHopperRegimes, SsdAccuracy, ::testing::ValuesIn(on_cuda(ssd_hopper_regimes())),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaRegimes, SsdAccuracy, ::testing::ValuesIn(on_cuda(ssd_regimes(300, 48, 64))),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaLong, SsdAccuracy, ::testing::ValuesIn(on_cuda(ssd_long_cases())), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaPairs, SsdStepAccuracy, ::testing::ValuesIn(on_cuda(for_step(ssd_pairs(SsdTable::full)))),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaRegimes, SsdStepAccuracy, ::testing::ValuesIn(on_cuda(for_step(ssd_regimes(70, 6, 17)))),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(CudaLong, SsdStepAccuracy, ::testing::ValuesIn(on_cuda(for_step(ssd_long_cases()))),
                         ssd_case_name);
#endif

INSTANTIATE_TEST_SUITE_P(Pairs, SsdAccuracy, ::testing::ValuesIn(ssd_pairs(SsdTable::full)), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(Small, SsdAccuracy, ::testing::ValuesIn(ssd_pairs(SsdTable::few)), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(Regimes, SsdAccuracy, ::testing::ValuesIn(ssd_regimes(300, 48, 64)), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(RegimesSmall, SsdAccuracy, ::testing::ValuesIn(ssd_regimes(70, 6, 17)), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(Long, SsdAccuracy, ::testing::ValuesIn(ssd_long_cases()), ssd_case_name);
INSTANTIATE_TEST_SUITE_P(Pairs, SsdStepAccuracy, ::testing::ValuesIn(for_step(ssd_pairs(SsdTable::full))),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(Small, SsdStepAccuracy, ::testing::ValuesIn(for_step(ssd_pairs(SsdTable::few))),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(RegimesSmall, SsdStepAccuracy, ::testing::ValuesIn(for_step(ssd_regimes(70, 6, 17))),
                         ssd_case_name);
INSTANTIATE_TEST_SUITE_P(Long, SsdStepAccuracy, ::testing::ValuesIn(for_step(ssd_long_cases())), ssd_case_name);

TEST(SsdAccuracySmall, EveryPairOfValuesMeets) {
  for (const SsdTable which : {SsdTable::full, SsdTable::few}) {
    const std::vector<int> count = ssd_levels(which);
    const std::vector<Row> rows = ssd_rows(which);
    std::set<std::tuple<std::size_t, int, std::size_t, int>> met;
    std::size_t expected = 0;
    for (std::size_t x = 0; x < count.size(); ++x) {
      for (std::size_t y = x + 1; y < count.size(); ++y) {
        expected += static_cast<std::size_t>(count[x]) * static_cast<std::size_t>(count[y]);
        for (const Row& row : rows) met.insert({x, row[x], y, row[y]});
      }
    }
    EXPECT_EQ(met.size(), expected);
  }
}

// The tables launch every kernel of the CUDA backend.
TEST(SsdAccuracySmall, EveryKernelIsRunByATest) {
  std::set<int> run;
  const auto add = [&run](const SsdPlan& plan) {
    for (const Launch& launch : plan.launches) run.insert(launch.kernel);
  };
  const Execution execution{
      .device = Device::cuda, .portable = true, .untested = true, .gpu = known_gpus().front().facts};
  for (const SsdCase& c : ssd_pairs(SsdTable::few)) {
    const SsdProblem problem(c);
    add(ssd_plan(problem.forward, execution));
    add(ssd_plan(problem.backward, execution));
  }
  for (const SsdCase& c : for_step(ssd_pairs(SsdTable::few))) {
    const SsdProblem problem(c);
    add(ssd_plan(problem.step(problem.forward.last_state), execution));
  }
  for (int kernel = 0; kernel <= static_cast<int>(SsdKernel::step); ++kernel)
    EXPECT_TRUE(run.contains(kernel)) << "no case runs " << name(static_cast<SsdKernel>(kernel));
}

// A plan for a GPU has launches and scratch for the optional tensors of its call.
TEST(SsdAccuracySmall, APlanForAGpuIsForItsOptionalTensors) {
  SsdCase c;
  c.shape = {.tokens = 20, .dqk = 8, .dhv = 8};
  c.skip = testkit::Skip::per_head;
  c.z = c.initial_state = true;
  const SsdProblem problem(c);
  const Execution execution{
      .device = Device::cuda, .portable = true, .untested = true, .gpu = known_gpus().front().facts};
  const SsdPlan all = ssd_plan(problem.forward, execution);
  const testkit::Buffer scratch(static_cast<std::int64_t>(all.scratch_bytes));
  SsdForward without_D = problem.forward, without_initial = problem.forward, without_last = problem.forward;
  without_D.D = {};
  without_initial.initial_state = {};
  without_last.last_state = {};
  for (const SsdForward& args : {without_D, without_initial, without_last}) {
    EXPECT_THROW(ssd_forward(args, all, std::span(scratch.data(), all.scratch_bytes)), InvalidArgument);
    EXPECT_LE(ssd_plan(args, execution).scratch_bytes, all.scratch_bytes);
  }
  EXPECT_LT(ssd_plan(without_last, execution).scratch_bytes, all.scratch_bytes);
}

}  // namespace
}  // namespace tfla::test
