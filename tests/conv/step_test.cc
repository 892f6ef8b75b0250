// The step against whole sequences, slots, rings, and the same bits for any number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "tests/conv/problem.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Tensor;

// The tokens [begin, begin + count) of a forward call, on a state [S,L,D].
ConvStep step_of(const ConvForward& f, std::int64_t begin, std::int64_t count, const MutableTensorView& state) {
  return {.x = slice(f.x, 1, begin, count),
          .weight = f.weight,
          .bias = f.bias,
          .y = slice(f.y, 1, begin, count),
          .state = state,
          .options = f.options};
}

using ConvStepTest = ConvOnDevice;
using ConvDeterminism = ConvOnDevice;

// States longer than needed, in both orders of axes, plain and as rings, by 1, 2 and 9 tokens at a time.
TEST_P(ConvStepTest, StepsAreTheWholeSequence) {
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    for (const std::int64_t width : {1, 2, 4, 5}) {
      for (const std::int64_t length : {width - 1, width + 2}) {
        for (const std::int64_t count : {1, 2, 9}) {
          for (const bool ring : {false, true}) {
            ConvCase c = here({.batch = 3, .tokens = 18, .channels = 7, .width = width, .dtype = dtype});
            c.state_dtype = dtype;
            c.layout = ring ? ConvLayout::tokens : ConvLayout::channels;
            ConvProblem problem(c);
            const Snapshot whole = problem.run();
            problem.poison();
            Tensor state(dtype, {3, 7, length});
            const MutableTensorView view = state.view.transposed(1, 2);
            overwrite(view, Values(static_cast<std::size_t>(3 * 7 * length), 0));
            for (std::int64_t t = 0; t < 18; t += count) {
              ConvStep step = step_of(problem.forward, t, count, view);
              const Tensor done = index_tensor(DType::int64, {3}, {t, t, t});
              if (ring) step.cache_seqlens = done.view;
              conv_step(step, execution_of(c));
              testkit::wait_for_buffers();  // before `done` is gone
            }
            EXPECT_TRUE(same_bits(gather(problem.forward.y), whole.at("y"))) << label(c) << " L" << length;
            EXPECT_TRUE(state.buffer->margins_intact());
            // The state holds the last inputs, of a ring in rows 18 - L, ... modulo L.
            const Values x = gather(problem.forward.x), kept = gather(view);
            for (std::int64_t row = 0; row < length; ++row) {
              const std::int64_t token = 18 - length + row, at = ring ? token % length : row;
              for (std::int64_t channel = 0; channel < 7; ++channel)
                EXPECT_EQ(kept[static_cast<std::size_t>(at * 7 + channel)],
                          x[static_cast<std::size_t>(token * 7 + channel)]);
            }
          }
        }
      }
    }
  }
}

TEST_P(ConvStepTest, SlotsTouchTheirStatesAlone) {
  const ConvCase c = here({.batch = 3, .tokens = 1, .channels = 5});
  ConvProblem problem(c);
  Tensor state(DType::float32, {4, 3, 5});
  overwrite(state.view, Values(60, 0.5));
  const Tensor slots = index_tensor(DType::int32, {3}, {2, -1, 0});
  ConvStep step = step_of(problem.forward, 0, 1, state.view);
  step.slots = slots.view;
  conv_step(step, execution_of(c));
  const Values x = gather(step.x), after = gather(state.view), y = gather(step.y);
  for (std::size_t row = 0; row < 12; ++row) {
    const bool changed = row == 2 || row == 8;  // the newest input of states 0 and 2
    for (std::size_t channel = 0; channel < 5; ++channel) {
      const double expected = changed ? x[(row == 8 ? 0 : 10) + channel] : 0.5;
      EXPECT_EQ(after[row * 5 + channel], expected);
    }
  }
  EXPECT_EQ(Values(y.begin() + 5, y.begin() + 10), Values(5, 0));
  EXPECT_NE(y[0], 0);
}

TEST_P(ConvDeterminism, ThreadsRunsAndScratchDoNotMatter) {
  for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens}) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const ConvCase c =
          here({.batch = 2, .tokens = 1100, .channels = 90, .dtype = dtype, .layout = layout, .state = true});
      ConvProblem problem(c);
      const Snapshot expected = problem.run();
      for (const int threads : {1, 2, 3, 8}) {
        problem.description.threads = threads;
        EXPECT_TRUE(same_bits(problem.run(), expected)) << label(c);
      }
      problem.description.threads = 3;
      const ConvPlan forward = conv_plan(problem.forward, execution_of(problem.description));
      const ConvPlan backward = conv_plan(problem.backward, execution_of(problem.description));
      const auto bytes = static_cast<std::int64_t>(std::max(forward.scratch_bytes, backward.scratch_bytes));
      const testkit::Buffer scratch(bytes);
      for (const int fill : {0xFF, 0x7B}) {
        std::memset(scratch.data(), fill, static_cast<std::size_t>(bytes));
        problem.poison();
        conv_forward(problem.forward, forward, std::span(scratch.data(), forward.scratch_bytes));
        conv_backward(problem.backward, backward, std::span(scratch.data(), backward.scratch_bytes));
        EXPECT_TRUE(same_bits(problem.contents(), expected)) << label(c);
        EXPECT_TRUE(scratch.margins_intact());
      }
    }
  }
}

// What one sequence holds, and what padding does, reaches no other.
TEST_P(ConvDeterminism, PoisonStaysInItsSequence) {
  for (const bool numbered : {false, true}) {
    ConvCase c = here({.batch = 1, .tokens = 20, .channels = 3, .bias = false});
    c.cu_seqlens = numbered ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{0, 6, 15};
    if (numbered) {
      for (std::int64_t t = 0; t < 20; ++t) c.seq_idx.push_back(t < 6 ? 0 : t < 15 ? 1 : -1);
    }
    ConvProblem problem(c);
    const Snapshot clean = problem.run();
    for (const auto& [first, last] : {std::pair<std::size_t, std::size_t>(6, 15), {15, 20}}) {
      const auto begin = static_cast<std::int64_t>(first), count = static_cast<std::int64_t>(last - first);
      const TensorView x = slice(problem.forward.x, 1, begin, count), dy = slice(problem.backward.dy, 1, begin, count);
      const Values saved_x = gather(x), saved_dy = gather(dy);
      overwrite(x, Values(saved_x.size(), std::numeric_limits<double>::quiet_NaN()));
      overwrite(dy, Values(saved_dy.size(), std::numeric_limits<double>::quiet_NaN()));
      Snapshot hurt = problem.run();
      for (const char* name : {"y", "dx"}) {
        const Values& before = clean.at(name);
        for (std::size_t at = 0; at < before.size(); ++at) {
          const bool own = first == 6 && at / 3 >= first && at / 3 < last;
          if (!own) {
            EXPECT_EQ(hurt.at(name)[at], before[at]) << name << at;
          }
          if (at / 3 >= 15) {
            EXPECT_EQ(before[at], 0) << name;
          }
        }
      }
      if (first == 15) {
        EXPECT_TRUE(same_bits(hurt.at("dweight"), clean.at("dweight")));
      }
      overwrite(x, saved_x);
      overwrite(dy, saved_dy);
    }
  }
}

// An input reaches W outputs, and through their slopes the gradients of W-1 inputs on either side.
TEST_P(ConvDeterminism, PoisonStaysInItsWindow) {
  constexpr std::int64_t tokens = 40, poisoned = 20;
  for (const std::int64_t width : {1, 2, 3, 4, 5}) {
    for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens}) {
      ConvProblem problem(here({.batch = 1, .tokens = tokens, .channels = 8, .width = width, .layout = layout}));
      overwrite(slice(problem.forward.x, 1, poisoned, 1), Values(8, std::numeric_limits<double>::quiet_NaN()));
      const Snapshot results = problem.run();
      for (std::int64_t t = 0; t < tokens; ++t) {
        const bool seen = t >= poisoned && t<poisoned + width, near = t> poisoned - width && t < poisoned + width;
        for (std::int64_t channel = 0; channel < 8; ++channel) {
          const auto at = static_cast<std::size_t>(t * 8 + channel);
          EXPECT_EQ(std::isnan(results.at("y")[at]), seen) << "W" << width << " token " << t;
          EXPECT_EQ(std::isnan(results.at("dx")[at]), near) << "W" << width << " token " << t;
        }
      }
    }
  }
}

// In place, and the state of a sequence that is shorter than it.
TEST_P(ConvDeterminism, TheLastStateMayTakeThePlaceOfTheInitialOne) {
  for (const std::int64_t tokens : {0, 2, 9}) {
    ConvProblem problem(here({.tokens = tokens, .channels = 24, .width = 5, .state = true}));
    const Snapshot expected = problem.run();
    ConvForward in_place = problem.forward;
    const Tensor state(DType::float32, {2, 4, 24});
    testkit::scatter(state.view, gather(problem.forward.initial_state));
    in_place.initial_state = in_place.last_state = state.view;
    conv_forward(in_place, execution_of(problem.description));
    EXPECT_TRUE(same_bits(gather(state.view), expected.at("last_state")));
    EXPECT_TRUE(same_bits(gather(in_place.y), expected.at("y")));
  }
}

TFLA_CONV_ON_DEVICES(ConvStepTest);
TFLA_CONV_ON_DEVICES(ConvDeterminism);

}  // namespace
}  // namespace tfla::test
