// The convolution against the float64 reference, and that against finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/conv/problem.h"

namespace tfla::test {
namespace {

constexpr DType dtypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};
constexpr std::int64_t lengths[] = {0, 1, 2, 3, 5, 64, 257};

// What a case has besides its sizes.
enum class Kind : std::uint8_t { plain, activated, stateful, packed, numbered };

ConvCase make_case(Kind kind, ConvCase c) {
  const std::int64_t T = c.tokens;
  c.silu = kind != Kind::plain;
  c.bias = kind == Kind::activated || kind == Kind::stateful;
  c.state = kind == Kind::stateful || kind == Kind::packed;
  c.state_dtype = c.dtype == DType::float64 ? DType::float64 : kind == Kind::packed ? c.dtype : DType::float32;
  c.weight_dtype = kind == Kind::activated           ? c.dtype
                   : c.state_dtype == DType::float64 ? DType::float64
                                                     : DType::float32;
  if (kind == Kind::packed) {
    c.batch = 1;
    c.cu_seqlens = {0, T / 4, T / 4, T / 4 + T / 8, T - T / 5};  // one is empty, and padding follows
  } else if (kind == Kind::numbered) {
    for (std::int64_t b = 0; b < c.batch; ++b)
      for (std::int64_t t = 0; t < T; ++t) c.seq_idx.push_back(t >= T - 2 ? -1 : (t + 7 * b) * 5 / (T + 1));
  }
  return c;
}

TEST(ConvAccuracySmall, EveryKindAgreesWithTheReference) {
  std::int64_t number = 0;
  for (const Kind kind : {Kind::plain, Kind::activated, Kind::stateful, Kind::packed, Kind::numbered}) {
    for (const DType dtype : dtypes) {
      for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens, ConvLayout::apart}) {
        for (const std::int64_t width : {1, 2, 3, 4, 5}) {
          for (const std::int64_t tokens : lengths) {
            const std::int64_t channels = ++number % 3 == 0 ? 19 : number % 3 == 1 ? 1 : 5;
            const ConvCase c = make_case(
                kind, {.tokens = tokens, .channels = channels, .width = width, .dtype = dtype, .layout = layout});
            ConvProblem problem(c);
            const Snapshot results = problem.run();
            EXPECT_TRUE(within_bounds(c, results, reference::evaluate(problem.call())));
            EXPECT_TRUE(problem.margins_intact()) << label(c);
          }
        }
      }
    }
  }
}

// Several spans, tiles and panels, and a width that kernels have no loop of their own for.
TEST(ConvAccuracySmall, LongSequencesAgreeWithTheReference) {
  for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens}) {
    for (const Kind kind : {Kind::stateful, Kind::packed, Kind::numbered}) {
      for (const std::int64_t width : {4, 9}) {
        const bool along = layout == ConvLayout::tokens;
        const ConvCase c = make_case(
            kind,
            {.batch = 2, .tokens = along ? 3000 : 700, .channels = along ? 35 : 270, .width = width, .layout = layout});
        ConvProblem problem(c);
        const Snapshot results = problem.run();
        EXPECT_TRUE(within_bounds(c, results, reference::evaluate(problem.call())));
      }
    }
  }
}

// Sums over many tokens stay exact to a few roundings of their result.
TEST(ConvAccuracySmall, GradientsOfWeightsOverManyTokens) {
  for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens}) {
    ConvCase c{.batch = 1, .tokens = 65536, .channels = 2, .layout = layout};
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

TEST(ConvAccuracySmall, ExtremeNumbersAreActivatedAsTheyShould) {
  ConvCase c{.batch = 1, .tokens = 8, .channels = 1, .width = 1, .bias = false};
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

// ---------------------------------------------------------------- the reference

double loss(const reference::ConvCall& call) {
  const reference::ConvResult r = reference::evaluate(call);
  double sum = 0;
  for (std::size_t at = 0; at < r.y.size(); ++at) sum += r.y[at] * call.dy[at];
  for (std::size_t at = 0; at < call.dlast_state.size(); ++at) sum += r.last_state[at] * call.dlast_state[at];
  return sum;
}

TEST(ConvReferenceSmall, GradientsAreThoseOfFiniteDifferences) {
  for (const Kind kind : {Kind::plain, Kind::activated, Kind::stateful, Kind::packed, Kind::numbered}) {
    const ConvCase c = make_case(kind, {.tokens = 9, .channels = 2, .width = 3, .dtype = DType::float64});
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
