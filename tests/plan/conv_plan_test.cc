// What is chosen for the convolution on a GPU, call by call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "plan/operators/conv_cuda.h"
#include "tests/conv/problem.h"

namespace tfla::test {
namespace {

constexpr Operation operations[] = {Operation::forward, Operation::backward, Operation::step};

Execution on(const KnownGpu& gpu) { return {.device = Device::cuda, .untested = true, .gpu = gpu.facts}; }

ConvShape shape_of(std::int64_t batch, std::int64_t tokens, std::int64_t channels, std::int64_t width = 4) {
  return {.batch = batch,
          .tokens = tokens,
          .channels = channels,
          .width = width,
          .sequences = batch,
          .dtype = DType::bfloat16};
}

// From a shape alone a call has all optional tensors.
TEST(ConvPlanSmall, LaunchesOnAGpu) {
  using enum ConvKernel;
  const struct {
    Operation operation;
    std::int64_t width;
    std::vector<ConvKernel> launches;
  } rows[] = {{Operation::forward, 4, {forward, last_state}},
              {Operation::forward, 1, {forward}},  // no state
              {Operation::backward, 4, {gradients, initial_state, sum_spans}},
              {Operation::backward, 1, {gradients, sum_spans}},
              {Operation::step, 4, {step}}};
  for (const KnownGpu& gpu : known_gpus()) {
    for (const auto& row : rows) {
      const ConvPlan plan = conv_plan(row.operation, shape_of(2, 1000, 768, row.width), {}, on(gpu));
      const std::string page = describe(plan);
      ASSERT_EQ(plan.launches.size(), row.launches.size()) << page;
      for (std::size_t at = 0; at < row.launches.size(); ++at) {
        EXPECT_EQ(plan.launches[at].kernel, static_cast<std::uint8_t>(row.launches[at])) << page;
        EXPECT_NE(page.find(name(row.launches[at])), std::string::npos) << page;
      }
      EXPECT_EQ(plan.scratch_bytes > 0, row.operation == Operation::backward) << page;
    }
  }
}

// 16 bytes of channels where rows have them; one channel else.
TEST(ConvPlanSmall, ChannelsOfAThread) {
  const struct {
    DType dtype;
    std::int64_t channels, width;
    bool aligned, along;
    std::int64_t forward, backward;
  } rows[] = {{DType::bfloat16, 768, 4, true, false, 8, 4}, {DType::float16, 768, 2, true, false, 8, 4},
              {DType::float32, 768, 4, true, false, 4, 4},  {DType::float64, 768, 4, true, false, 2, 2},
              {DType::bfloat16, 764, 4, true, false, 1, 1}, {DType::float32, 764, 4, true, false, 4, 4},
              {DType::float32, 767, 4, true, false, 1, 1},  {DType::bfloat16, 768, 5, true, false, 1, 1},
              {DType::float32, 768, 4, false, false, 1, 1}, {DType::float32, 768, 4, true, true, 1, 1}};
  for (const KnownGpu& gpu : known_gpus()) {
    for (const auto& row : rows) {
      ConvShape shape = shape_of(4, 8192, row.channels, row.width);
      shape.dtype = row.dtype;
      shape.aligned = row.aligned;
      shape.along_tokens = row.along;
      EXPECT_EQ(conv_plan(Operation::forward, shape, {}, on(gpu)).panel, row.forward);
      EXPECT_EQ(conv_plan(Operation::backward, shape, {}, on(gpu)).panel, row.backward);
      EXPECT_EQ(conv_plan(Operation::step, shape, {}, on(gpu)).panel, 1);
    }
  }
}

// Long spans where there is enough to do, short ones where there is not, the larger the GPU the sooner.
TEST(ConvPlanSmall, SpansLeaveThreadsToEveryMultiprocessor) {
  for (const KnownGpu& gpu : known_gpus()) {
    std::int64_t before = 0;
    for (const std::int64_t tokens : {1, 64, 1024, 8192, 65536, 1 << 20}) {
      for (const bool along : {false, true}) {
        ConvShape shape = shape_of(1, tokens, 2048);
        shape.along_tokens = along;
        const ConvPlan plan = conv_plan(Operation::forward, shape, {}, on(gpu));
        const std::int64_t lanes = conv_lanes(shape), threads = plan.spans() * plan.panels() * lanes;
        EXPECT_EQ(plan.span % (lanes * plan.tile), 0) << describe(plan);
        if (plan.span > (along ? 128 : 16)) {
          EXPECT_GE(threads, 1024 * gpu.facts.multiprocessors) << describe(plan);
        }
        if (along) continue;
        EXPECT_GE(plan.span, before) << describe(plan);
        before = plan.span;
      }
    }
    EXPECT_EQ(before, 128) << gpu.name;
  }
}

TEST(ConvPlanSmall, SumsOfSpansTakeScratch) {
  const ConvShape shape = shape_of(2, 1000, 768);
  const ConvPlan plan = conv_plan(Operation::backward, shape, {}, on(known_gpus().front()));
  EXPECT_EQ(plan.scratch_bytes, static_cast<std::size_t>(plan.spans() * 5 * 768 * 4)) << describe(plan);
  ConvShape wide = shape;
  wide.dtype = DType::float64;
  const ConvPlan of_double = conv_plan(Operation::backward, wide, {}, on(known_gpus().front()));
  EXPECT_EQ(of_double.scratch_bytes, static_cast<std::size_t>(of_double.spans() * 5 * 768 * 8));
}

// The tables launch every kernel of the CUDA backend in every type, panel and number of taps that it is compiled for.
TEST(ConvPlanSmall, EveryKernelIsRunByATest) {
  std::set<std::tuple<int, DType, bool, bool>> run;
  const auto add = [&run](const ConvPlan& plan) {
    for (const Launch& launch : plan.launches)
      run.insert({launch.kernel, plan.shape.dtype, plan.panel > 1, plan.shape.width > conv_few_taps});
  };
  for (const ConvCase& c : conv_cases()) {
    const ConvProblem problem(c);
    const Execution execution = on(known_gpus().front());
    if (c.tokens == 0) continue;
    add(conv_plan(problem.forward, execution));
    add(conv_plan(problem.backward, execution));
    if (c.layout == ConvLayout::channels) add(conv_plan(Operation::step, shape_of(2, 1, 5, c.width), {}, execution));
  }
  for (const DType dtype : conv_dtypes) {
    for (const ConvKernel kernel : {ConvKernel::forward, ConvKernel::gradients}) {
      for (const auto& [pieces, many] : {std::pair(true, false), {false, false}, {false, true}}) {
        EXPECT_TRUE(run.contains({static_cast<int>(kernel), dtype, pieces, many}))
            << "no case runs " << name(kernel) << " of " << tfla::name(dtype);
      }
    }
  }
  for (int kernel = 0; kernel <= static_cast<int>(ConvKernel::step); ++kernel) {
    const bool any = std::ranges::any_of(run, [&](const auto& row) { return std::get<0>(row) == kernel; });
    EXPECT_TRUE(any) << "no case runs " << name(static_cast<ConvKernel>(kernel));
  }
}

// A plan for a GPU has launches for the optional tensors of its call.
TEST(ConvPlanSmall, APlanForAGpuIsForItsOptionalTensors) {
  const ConvProblem problem({.tokens = 9, .state = true});
  const Execution execution = on(known_gpus().front());
  const ConvPlan forward = conv_plan(problem.forward, execution), backward = conv_plan(problem.backward, execution);
  ConvForward without_last = problem.forward;
  without_last.last_state = {};
  ConvBackward without_initial = problem.backward;
  without_initial.dinitial_state = {};
  const testkit::Buffer scratch(static_cast<std::int64_t>(backward.scratch_bytes));
  EXPECT_THROW(conv_forward(without_last, forward, {}), InvalidArgument);
  EXPECT_THROW(conv_backward(without_initial, backward, std::span(scratch.data(), backward.scratch_bytes)),
               InvalidArgument);
  EXPECT_EQ(conv_plan(without_last, execution).launches.size(), 1U);
  EXPECT_EQ(conv_plan(without_initial, execution).launches.size(), 2U);
}

TEST(ConvPlanSmall, ThereAreNoCudaKernelsForCallersYet) {
  const ConvProblem problem({.tokens = 9});
  for (const Operation operation : operations)
    EXPECT_THROW((void)conv_plan(operation, shape_of(1, 8, 8), {}, {.device = Device::cuda}), Unavailable);
  EXPECT_THROW(conv_forward(problem.forward, {.device = Device::cuda}), Unavailable);
  EXPECT_THROW(conv_backward(problem.backward, {.device = Device::cuda}), Unavailable);
}

}  // namespace
}  // namespace tfla::test
