// The instruments: conversions, random numbers, and a judge that notices what it should.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "reference/regimes.h"
#include "reference/values.h"
#include "testkit/bounds.h"
#include "testkit/tensor.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::decode_bfloat16;
using reference::decode_float16;
using reference::encode_bfloat16;
using reference::encode_float16;

TEST(ValuesSmall, EveryHalfSurvivesARoundTrip) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (std::isnan(decode_bfloat16(half))) {
      EXPECT_TRUE(std::isnan(decode_bfloat16(encode_bfloat16(decode_bfloat16(half)))));
    } else {
      ASSERT_EQ(encode_bfloat16(decode_bfloat16(half)), half);
    }
    if (std::isnan(decode_float16(half))) {
      EXPECT_TRUE(std::isnan(decode_float16(encode_float16(decode_float16(half)))));
    } else {
      ASSERT_EQ(encode_float16(decode_float16(half)), half);
    }
  }
}

TEST(ValuesSmall, RoundsToNearestTiesToEven) {
  const struct {
    double value, bfloat16, float16;
  } rows[] = {{1 + 0x1p-8, 1, 1 + 0x1p-8},                     // a tie in bfloat16, down to even
              {1 + 3 * 0x1p-8, 1 + 0x1p-6, 1 + 3 * 0x1p-8},    // a tie, up to even
              {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-7, 1 + 0x1p-8},  // just above a tie: not via float32
              {1 + 0x1p-11, 1, 1},                             // a tie in float16
              {1 + 3 * 0x1p-11, 1, 1 + 0x1p-9},                //
              {-2 + 0x1p-10, -2, -2 + 0x1p-10},                // the last of a binade
              {65519, 65536, 65504},                           // below the middle between the largest and infinity
              {65520, 65536, std::numeric_limits<double>::infinity()},
              {0x1p-24, 0x1p-24, 0x1p-24},      // least subnormal of float16
              {0x1p-25, 0x1p-25, 0},            // its half, a tie
              {0x1.8p-25, 0x1.8p-25, 0x1p-24},  //
              {0x1p-133, 0x1p-133, 0},          // least subnormal of bfloat16
              {-0.0, -0.0, -0.0}};
  for (const auto& row : rows) {
    EXPECT_EQ(decode_bfloat16(encode_bfloat16(row.value)), row.bfloat16) << row.value;
    EXPECT_EQ(decode_float16(encode_float16(row.value)), row.float16) << row.value;
  }
}

TEST(RegimesSmall, HaveTheirMomentsAndTheirResets) {
  constexpr std::int64_t count = 40000;
  const struct {
    reference::Regime regime;
    double i_mean, i_deviation, f_mean, f_deviation;  // f of the first of four heads: lin = 3
  } rows[] = {{reference::Regime::randn, 0, 1, 0, 1},
              {reference::Regime::init, -10, 0.3, 3, 0.3},
              {reference::Regime::trained_like, -4, 3, 3, 2},
              {reference::Regime::large_i, 10, 3, 4, 2},
              {reference::Regime::never_forget, -2, 1, 12, 1}};
  for (const auto& row : rows) {
    double sums[4] = {};
    for (std::int64_t t = 0; t < count; ++t) {
      const double i = reference::input_gate(row.regime, reference::normal(7, reference::Stream::i, t));
      const double f = reference::forget_gate(row.regime, reference::normal(7, reference::Stream::f, t), t, 0, 4);
      sums[0] += i / count;
      sums[1] += (i - row.i_mean) * (i - row.i_mean) / count;
      sums[2] += f / count;
      sums[3] += (f - row.f_mean) * (f - row.f_mean) / count;
    }
    // The mean of 40000 draws is off by a 200th of the deviation; six times that.
    EXPECT_NEAR(sums[0], row.i_mean, 0.03 * row.i_deviation) << name(row.regime);
    EXPECT_NEAR(std::sqrt(sums[1]), row.i_deviation, 0.03 * row.i_deviation) << name(row.regime);
    EXPECT_NEAR(sums[2], row.f_mean, 0.03 * row.f_deviation) << name(row.regime);
    EXPECT_NEAR(std::sqrt(sums[3]), row.f_deviation, 0.03 * row.f_deviation) << name(row.regime);
  }
  EXPECT_EQ(reference::forget_gate(reference::Regime::resets, 0, 96, 3, 4), -25);
  EXPECT_EQ(reference::forget_gate(reference::Regime::resets, 0, 97, 3, 4), 6);
  EXPECT_EQ(reference::forget_gate(reference::Regime::resets, 0, 97, 0, 1), 3);
  EXPECT_LE(reference::input_gate(reference::Regime::capped_extremes, 100), 15);
}

testkit::Case small_case() {
  return {.shape = {.batch = 2, .tokens = 5, .qk_heads = 1, .heads = 2, .dqk = 3, .dhv = 4},
          .cu_seqlens = {},
          .options = {},
          .initial_state = true,
          .last_state_grad = true};
}

TEST(HarnessSmall, LayoutsHoldTheSameNumbers) {
  testkit::Case description = small_case();
  testkit::Problem rows(description);
  for (const testkit::Layout layout : {testkit::Layout::bhtd, testkit::Layout::fused}) {
    description.layout = layout;
    testkit::Problem other(description);
    const auto same = [](const TensorView& x, const TensorView& y) {
      return same_bits(testkit::gather(x), testkit::gather(y));
    };
    EXPECT_TRUE(same(other.forward().q, rows.forward().q));
    EXPECT_TRUE(same(other.forward().k, rows.forward().k));
    EXPECT_TRUE(same(other.forward().v, rows.forward().v));
    EXPECT_TRUE(same(other.forward().i, rows.forward().i));
    EXPECT_TRUE(same(other.forward().f, rows.forward().f));
    EXPECT_TRUE(same(other.backward().dh, rows.backward().dh));
    EXPECT_NE(other.forward().q.strides, rows.forward().q.strides);
  }
}

TEST(HarnessSmall, JudgeSeesWhatNobodyWrote) {
  testkit::Problem problem(small_case());
  const testkit::Judge judge(problem, true);
  for (const auto& errors : {judge.forward_errors(), judge.backward_errors()}) {
    for (const testkit::TensorError& error : errors) {
      EXPECT_GT(error.not_finite, 0) << error.tensor;
      EXPECT_TRUE(std::isinf(error.relative)) << error.tensor;
    }
  }
}

TEST(HarnessSmall, JudgeMeasuresRelativeErrorAndWorstElement) {
  testkit::Problem problem(small_case());
  const testkit::Judge judge(problem, true);
  const auto h_error = [&] { return judge.forward_errors().front(); };
  const MutableTensorView h = problem.forward().h;
  const auto count = static_cast<std::size_t>(reference::element_count(h));
  testkit::scatter(h, Values(count, 0));
  EXPECT_DOUBLE_EQ(h_error().relative, 1);
  const double largest = h_error().worst;
  const std::int64_t where = h_error().worst_index;
  Values spike(count, 0);
  spike[static_cast<std::size_t>(where)] = 10 * largest;
  testkit::scatter(h, spike);
  EXPECT_EQ(h_error().worst_index, where);
  EXPECT_GE(h_error().worst, 9 * largest * (1 - 1e-6));
  spike[3] = std::numeric_limits<double>::quiet_NaN();
  testkit::scatter(h, spike);
  EXPECT_EQ(h_error().not_finite, 1);
  EXPECT_EQ(h_error().worst_index, 3);
}

TEST(HarnessSmall, JudgeSeesAWriteJustOutside) {
  testkit::Problem problem(small_case());
  const testkit::Judge judge(problem, true);
  const auto count_outside = [](const std::vector<testkit::TensorError>& errors) {
    return std::count_if(errors.begin(), errors.end(), [](const auto& e) { return e.tensor.starts_with("outside"); });
  };
  EXPECT_EQ(count_outside(judge.forward_errors()), 0);
  const MutableTensorView h = problem.forward().h, dk = problem.backward().dk;
  reference::store(h.data, h.dtype, reference::element_count(h), 1);
  reference::store(dk.data, dk.dtype, -1, 1);
  EXPECT_EQ(count_outside(judge.forward_errors()), 1);
  EXPECT_EQ(count_outside(judge.backward_errors()), 1);
  problem.poison();
  EXPECT_EQ(count_outside(judge.forward_errors()), 0);
}

TEST(HarnessSmall, SameStateInAnotherScaleIsNoError) {
  testkit::Case description = small_case();
  description.shape.tokens = 0;  // then the last state is the initial state
  testkit::Problem problem(description);
  const MlstmForward& args = problem.forward();
  const Values C = testkit::gather(args.initial_state.C), n = testkit::gather(args.initial_state.n);
  const Values m = testkit::gather(args.initial_state.m);
  const auto moved = [](Values values, double factor, double shift) {
    for (double& x : values) x = factor * x + shift;
    return values;
  };
  testkit::scatter(args.last_state.C, moved(C, std::exp(1), 0));
  testkit::scatter(args.last_state.n, moved(n, std::exp(1), 0));
  testkit::scatter(args.last_state.m, moved(m, 1, -1));
  const testkit::Judge judge(problem, false);
  for (const testkit::TensorError& error : judge.forward_errors()) EXPECT_LT(error.relative, 1e-6) << error.tensor;
  testkit::scatter(args.last_state.m, m);
  EXPECT_GT(judge.forward_errors().back().relative, 1);
}

// Roundings of the operands are found again in results at about their own size, and in those that are differences of
// large numbers far above it: the exact gradient of q where one token has made up the state.
TEST(HarnessSmall, RoundingsExplainTheErrorsTheyMake) {
  constexpr double unit = 0x1p-9;
  testkit::Case c;
  c.shape = {.tokens = 40, .qk_heads = 2, .heads = 2, .dqk = 16, .dhv = 24};
  c.options.gate = InputGate::sigmoid;
  testkit::Problem plain(c);
  const testkit::Judge judge(plain, true);
  const auto none = judge.explained(0, 0), some = judge.explained(unit, 0), twice = judge.explained(2 * unit, 0);
  for (const char* tensor : {"h", "C", "dq", "dk", "dv", "di"}) {
    EXPECT_EQ(none.at(tensor), 0) << tensor;
    EXPECT_GT(some.at(tensor), unit / 4) << tensor;
    EXPECT_LT(some.at(tensor), 3 * unit) << tensor;
    EXPECT_NEAR(twice.at(tensor) / some.at(tensor), 2, 0.1) << tensor;
  }
  EXPECT_EQ(some.at("n"), 0);

  c.options = {.exact_normalizer_grad = true};
  testkit::Problem spiked(c);
  Values i(static_cast<std::size_t>(40 * 2), -2);
  i[0] = i[1] = 12;
  overwrite(spiked.forward().i, i);
  EXPECT_GT(testkit::Judge(spiked, true).explained(unit, 0).at("dq"), 9 * unit);
}

}  // namespace
}  // namespace tfla::test
