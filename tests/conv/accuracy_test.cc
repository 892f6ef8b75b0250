// The convolution against the float64 reference, and that against finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/conv/problem.h"

namespace tfla::test {
namespace {

using ConvAccuracy = ConvOnDevice;

TEST_P(ConvAccuracy, EveryKindAgreesWithTheReference) {
  for (const ConvCase& row : conv_cases()) {
    const ConvCase c = here(row);
    ConvProblem problem(c);
    const Snapshot results = problem.run();
    EXPECT_TRUE(within_bounds(c, results, reference::evaluate(problem.call())));
    EXPECT_TRUE(problem.margins_intact()) << label(c);
  }
}

// Several spans, tiles and panels, and a width that kernels have no loop of their own for.
TEST_P(ConvAccuracy, LongSequencesAgreeWithTheReference) {
  for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens}) {
    for (const ConvKind kind : {ConvKind::stateful, ConvKind::packed, ConvKind::numbered}) {
      for (const std::int64_t width : {4, 9, 32}) {
        const bool along = layout == ConvLayout::tokens;
        const ConvCase c = here(conv_case(kind, {.batch = 2,
                                                 .tokens = along ? 3000 : 700,
                                                 .channels = along ? 35 : 270,
                                                 .width = width,
                                                 .layout = layout}));
        ConvProblem problem(c);
        const Snapshot results = problem.run();
        EXPECT_TRUE(within_bounds(c, results, reference::evaluate(problem.call())));
      }
    }
  }
}

// Sums over many tokens stay exact to a few roundings of their result.
TEST_P(ConvAccuracy, GradientsOfWeightsOverManyTokens) {
  for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens}) {
    const ConvCase c = here({.batch = 1, .tokens = 65536, .channels = 2, .layout = layout});
    ConvProblem problem(c);
    overwrite(problem.backward.x, Values(2 * 65536, 1.0));  // all terms have one sign
    overwrite(problem.backward.dy, Values(2 * 65536, 0.3));
    const Snapshot results = problem.run();
    const reference::ConvResult expected = reference::evaluate(problem.call());
    for (const auto& [name, values] : {std::pair("dweight", &expected.dweight), std::pair("dbias", &expected.dbias)}) {
      for (std::size_t at = 0; at < values->size(); ++at)
        EXPECT_NEAR(results.at(name)[at] / values->at(at), 1, 1e-5) << name;
    }
  }
}

TEST_P(ConvAccuracy, ExtremeNumbersAreActivatedAsTheyShould) {
  ConvCase c = here({.batch = 1, .tokens = 8, .channels = 1, .width = 1, .bias = false});
  for (const DType dtype : {DType::float32, DType::float64}) {
    c.dtype = c.weight_dtype = c.state_dtype = dtype;
    ConvProblem problem(c);
    overwrite(problem.forward.weight, {1});
    overwrite(problem.backward.dy, Values(8, 1));
    overwrite(problem.forward.x, {-1e30, -800, -110, -90, 0, 90, 1e30, std::nan("")});
    const Snapshot results = problem.run();
    const Values expected = {0, 0, 0, 0, 0, 90, 1e30}, slopes = {0, 0, 0, 0, 0.5, 1, 1};
    for (std::size_t at = 0; at < expected.size(); ++at) {
      EXPECT_NEAR(results.at("y")[at], expected[at], std::abs(expected[at]) * 1e-6 + 1e-30) << at;
      EXPECT_NEAR(results.at("dx")[at], slopes[at], 1e-6) << at;
    }
    EXPECT_TRUE(std::isnan(results.at("y")[7]));
    EXPECT_TRUE(std::isnan(results.at("dx")[7]));
  }
}

TFLA_CONV_ON_DEVICES(ConvAccuracy);

// ---------------------------------------------------------------- the reference

double loss(const reference::ConvCall& call) {
  const reference::ConvResult r = reference::evaluate(call);
  double sum = 0;
  for (std::size_t at = 0; at < r.y.size(); ++at) sum += r.y[at] * call.dy[at];
  for (std::size_t at = 0; at < call.dlast_state.size(); ++at) sum += r.last_state[at] * call.dlast_state[at];
  return sum;
}

TEST(ConvReferenceSmall, GradientsAreThoseOfFiniteDifferences) {
  for (const ConvKind kind : conv_kinds) {
    const ConvCase c = conv_case(kind, {.tokens = 9, .channels = 2, .width = 3, .dtype = DType::float64});
    reference::ConvCall call = ConvProblem(c).call();
    const reference::ConvResult r = reference::evaluate(call);
    for (const auto& [values, gradient] :
         {std::pair(&call.x, &r.dx), std::pair(&call.weight, &r.dweight), std::pair(&call.bias, &r.dbias),
          std::pair(&call.initial_state, &r.dinitial_state)}) {
      for (std::size_t at = 0; at < values->size(); ++at) {
        const double here = (*values)[at], step = 1e-5;
        (*values)[at] = here + step;
        const double above = loss(call);
        (*values)[at] = here - step;
        const double below = loss(call);
        (*values)[at] = here;
        EXPECT_NEAR((above - below) / (2 * step), (*gradient)[at], 1e-8) << label(c);
      }
    }
  }
}

}  // namespace
}  // namespace tfla::test
