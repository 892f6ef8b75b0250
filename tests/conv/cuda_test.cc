// The convolution on a GPU, beyond the tables: what the host cannot see must lead nowhere, and pieces of rows make the
// numbers that single elements do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/conv/problem.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Tensor;

class CudaConv : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  }
};

ConvCase on_cuda(ConvCase c) {
  c.device = Device::cuda;
  return c;
}

// A state of every dtype beside an x of every dtype, at the widths of both kinds of kernels.
TEST_F(CudaConv, StatesOfAStepMayHaveAnyDtype) {
  for (const DType dtype : conv_dtypes) {
    for (const DType stored : conv_dtypes) {
      for (const std::int64_t width : {4, 32}) {
        const ConvCase c = on_cuda({.tokens = 3, .channels = 5, .width = width, .dtype = dtype});
        ConvProblem problem(c);
        const Tensor state(stored, {2, width, 5});
        const std::size_t count = 2 * static_cast<std::size_t>(width) * 5;
        Values before(count);
        for (std::size_t at = 0; at < count; ++at) before[at] = static_cast<double>(at % 7) / 4 - 0.5;  // exact
        testkit::scatter(state.view, before);
        problem.poison();
        conv_step({.x = problem.forward.x,
                   .weight = problem.forward.weight,
                   .bias = problem.forward.bias,
                   .y = problem.forward.y,
                   .state = state.view,
                   .options = problem.forward.options},
                  execution_of(c));
        reference::ConvCall call = problem.call();
        call.dy = {};
        for (std::size_t b = 0; b < 2; ++b)
          call.initial_state.insert(
              call.initial_state.end(),
              before.begin() + static_cast<std::ptrdiff_t>((b * static_cast<std::size_t>(width) + 1) * 5),
              before.begin() + static_cast<std::ptrdiff_t>((b + 1) * static_cast<std::size_t>(width) * 5));
        EXPECT_TRUE(within_bounds(c, {{"y", gather(problem.forward.y)}}, reference::evaluate(call)));
        const Values after = gather(state.view), x = gather(problem.forward.x);
        const Tensor rounded(stored, {2, 3, 5});
        testkit::scatter(rounded.view, x);
        const Values kept = gather(rounded.view);
        for (std::size_t b = 0; b < 2; ++b) {
          for (std::size_t at = 0; at < static_cast<std::size_t>(width) * 5; ++at) {
            const std::size_t first = b * static_cast<std::size_t>(width) * 5,
                              old = static_cast<std::size_t>(width - 3) * 5;
            EXPECT_EQ(after[first + at], at < old ? before[first + at + 15] : kept[b * 15 + at - old]);
          }
        }
        EXPECT_TRUE(state.buffer->margins_intact());
      }
    }
  }
}

// Slots that do not exist are padding, and a count below 0 is as good as 0.
TEST_F(CudaConv, SlotsAndCountsThatAreWrongLeadNowhere) {
  const ConvCase c = on_cuda({.batch = 3, .tokens = 2, .channels = 5});
  ConvProblem problem(c);
  for (const bool ring : {false, true}) {
    const Tensor state(DType::float32, {4, 3, 5});
    overwrite(state.view, Values(60, 0.5));
    const Tensor slots = index_tensor(DType::int64, {3}, {4, -7, 1}),
                 counts = index_tensor(DType::int64, {3}, {1, 1, -5});
    ConvStep step{.x = problem.forward.x,
                  .weight = problem.forward.weight,
                  .bias = problem.forward.bias,
                  .y = problem.forward.y,
                  .state = state.view,
                  .slots = slots.view,
                  .options = problem.forward.options};
    if (ring) step.cache_seqlens = counts.view;
    conv_step(step, execution_of(c));
    const Values y = gather(step.y), after = gather(state.view), x = gather(step.x);
    EXPECT_EQ(Values(y.begin(), y.begin() + 20), Values(20, 0));
    EXPECT_NE(y[20], 0);
    for (std::size_t at = 0; at < 60; ++at) {
      const std::size_t row = at / 5, first = ring ? 3 : 4;  // of the two new inputs
      const bool changed = row == first || row == first + 1;
      EXPECT_EQ(after[at], changed ? x[20 + at - first * 5] : 0.5) << at;
    }
    EXPECT_TRUE(state.buffer->margins_intact());
    EXPECT_TRUE(problem.margins_intact());
  }
}

// A number that comes back is another sequence.
TEST_F(CudaConv, ANumberThatComesBackIsAnotherSequence) {
  ConvCase c = on_cuda({.batch = 1, .tokens = 12, .channels = 24, .width = 4});
  c.seq_idx = {0, 0, 1, 2, 2, -1, 3, 3, 3, 4, 5, 5};
  ConvProblem problem(c);
  const Snapshot expected = problem.run();
  const Tensor numbers = index_tensor(DType::int64, {1, 12}, {0, 0, 1, 0, 0, -1, 0, 0, 0, 1, 0, 0});
  problem.forward.seq_idx = problem.backward.seq_idx = numbers.view;
  EXPECT_TRUE(same_bits(problem.run(), expected));
}

// cu_seqlens that falls, or leads out of the tensors, is the caller's mistake; the call ends and writes where it may.
TEST_F(CudaConv, SequencesThatDoNotFitLeadNowhere) {
  ConvCase c = on_cuda({.batch = 1, .tokens = 40, .channels = 24, .state = true});
  c.cu_seqlens = {0, 10, 20, 30};
  ConvProblem problem(c);
  for (const std::vector<std::int64_t>& bounds :
       {std::vector<std::int64_t>{0, 30, 4, 40}, {5, 3, 100, 90}, {-7, 10, -20, 35}, {1000, 10, 2000, -30}}) {
    const Tensor cu = index_tensor(DType::int32, {4}, bounds);
    problem.forward.cu_seqlens = problem.backward.cu_seqlens = cu.view;
    static_cast<void>(problem.run());
    EXPECT_TRUE(problem.margins_intact());
  }
}

// The same numbers in rows that begin on 16 bytes, and in rows that do not.
TEST_F(CudaConv, PiecesAndElementsMakeTheSameNumbers) {
  for (const DType dtype : conv_dtypes) {
    for (const ConvKind kind : conv_kinds) {
      ConvProblem pieces(conv_case(kind, on_cuda({.tokens = 70, .channels = 24, .dtype = dtype})));
      ConvProblem elements(
          conv_case(kind, on_cuda({.tokens = 70, .channels = 24, .dtype = dtype, .layout = ConvLayout::apart})));
      EXPECT_GT(conv_plan(pieces.forward, execution_of(pieces.description)).panel, 1);
      EXPECT_EQ(conv_plan(elements.forward, execution_of(elements.description)).panel, 1);
      EXPECT_TRUE(same_bits(pieces.run(), elements.run())) << label(pieces.description);
    }
  }
}

// Spans as long as large calls have them.
TEST_F(CudaConv, SpansOfAnyLengthMakeTheSameNumbers) {
  for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens}) {
    for (const std::int64_t width : {4, 5}) {
      for (const ConvKind kind : {ConvKind::stateful, ConvKind::packed, ConvKind::numbered}) {
        const ConvCase c =
            on_cuda(conv_case(kind, {.batch = 3, .tokens = 900, .channels = 4, .width = width, .layout = layout}));
        ConvProblem problem(c);
        const Snapshot expected = problem.run();
        const reference::ConvResult truth = reference::evaluate(problem.call());
        const ConvPlan forward = conv_plan(problem.forward, execution_of(c));
        const ConvPlan backward = conv_plan(problem.backward, execution_of(c));
        const testkit::Buffer scratch(static_cast<std::int64_t>(backward.scratch_bytes));
        for (const std::int64_t times : {2, 4, 8}) {
          problem.poison();
          ConvPlan longer = forward;
          longer.span *= times;
          if (layout == ConvLayout::channels) longer.tile = longer.span;
          conv_forward(problem.forward, longer, {});
          longer = backward;
          longer.span *= times;
          if (layout == ConvLayout::channels) longer.tile = longer.span;
          conv_backward(problem.backward, longer, std::span(scratch.data(), backward.scratch_bytes));
          const Snapshot results = problem.contents();
          EXPECT_TRUE(within_bounds(c, results, truth));
          for (const char* name : {"y", "dx"}) EXPECT_TRUE(same_bits(results.at(name), expected.at(name))) << label(c);
        }
      }
    }
  }
}

// A plan for rows that begin on 16 bytes serves no others; one for elements serves all.
TEST_F(CudaConv, APlanForPiecesIsForRowsOn16Bytes) {
  ConvProblem problem(on_cuda({.tokens = 9, .channels = 24}));
  const Tensor wide(DType::float32, {2, 9, 28});
  ConvForward moved = problem.forward;
  moved.x = slice(wide.view, 2, 1, 24);
  overwrite(moved.x, gather(problem.forward.x));
  const Execution execution = execution_of(problem.description);
  const ConvPlan pieces = conv_plan(problem.forward, execution), elements = conv_plan(moved, execution);
  EXPECT_GT(pieces.panel, elements.panel);
  EXPECT_THROW(conv_forward(moved, pieces, std::span<std::byte>()), InvalidArgument);
  conv_forward(problem.forward, pieces, std::span<std::byte>());
  const Values expected = gather(problem.forward.y);
  for (const ConvForward& args : {moved, problem.forward}) {
    problem.poison();
    conv_forward(args, elements, std::span<std::byte>());
    EXPECT_TRUE(same_bits(gather(args.y), expected));
  }
}

}  // namespace
}  // namespace tfla::test
