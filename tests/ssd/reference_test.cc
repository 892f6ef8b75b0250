// The float64 reference of the state space dual itself: against finite differences and what must hold exactly.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>

#include "reference/ssd.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::SsdCall;
using reference::SsdResult;

// The upper 24 bits of a 64-bit linear congruential generator, in [-1, 1).
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed) {}

  Values operator()(std::int64_t count, double factor = 1, double center = 0) {
    Values values;
    for (std::int64_t index = 0; index < count; ++index) {
      state_ = state_ * 6364136223846793005U + 1442695040888963407U;
      values.push_back(factor * (static_cast<double>(state_ >> 40) / 8388608 - 1) + center);
    }
    return values;
  }

 private:
  std::uint64_t state_;
};

struct Variant {
  std::int64_t groups;
  int skip;  // axes of D, 0: none
  bool z, bias, softplus;
  double dt_min, dt_max;
  std::vector<std::int64_t> cu_seqlens, seq_idx;  // seq_idx of one row
};

constexpr double infinity = std::numeric_limits<double>::infinity();
const Variant variants[] = {{4, 0, false, false, false, 0, infinity, {}, {}},
                            {2, 1, true, false, true, 0, infinity, {}, {}},
                            {1, 2, true, true, true, 0.4, 0.9, {}, {0, 0, 1, 1, 1, 0}},
                            {2, 2, false, true, false, 0.3, 0.9, {0, 3, 3, 4}, {}},
                            {4, 1, true, true, true, 0, 0.8, {0, 0, 1, 6}, {5, 5, 2, 2, 3, 3}}};

SsdCall random_call(const Variant& variant, std::uint64_t seed) {
  Draw draw(seed);
  SsdCall call{.batch = variant.cu_seqlens.empty() ? 2 : 1,
               .tokens = 6,
               .groups = variant.groups,
               .heads = 4,
               .dim = 2,
               .state_dim = 3,
               .cu_seqlens = variant.cu_seqlens};
  for (std::int64_t row = 0; row < call.batch && !variant.seq_idx.empty(); ++row)
    call.seq_idx.insert(call.seq_idx.end(), variant.seq_idx.begin(), variant.seq_idx.end());
  const std::int64_t rows = call.batch * call.tokens, P = call.dim, S = call.state_dim, H = call.heads;
  call.x = draw(rows * H * P, 2);
  call.dt = draw(rows * H, 0.5, variant.softplus ? 0 : 0.6);
  call.A = draw(H, 1, -1.5);
  call.B = draw(rows * call.groups * S);
  call.C = draw(rows * call.groups * S, 2);
  if (variant.skip > 0) call.D = draw(variant.skip == 2 ? H * P : H);
  if (variant.z) call.z = draw(rows * H * P, 2);
  if (variant.bias) call.dt_bias = draw(H, 0.2);
  call.initial_state = draw(call.sequences() * H * P * S, 2);
  call.dy = draw(rows * H * P, 2);
  call.dlast_state = draw(call.sequences() * H * P * S, 2);
  return call;
}

SsdOptions options_of(const Variant& variant) {
  return {.dt_softplus = variant.softplus, .dt_min = variant.dt_min, .dt_max = variant.dt_max};
}

double inner(const Values& x, const Values& y) { return std::inner_product(x.begin(), x.end(), y.begin(), 0.0); }

// The functional that the gradients are of. Tokens behind the last sequence have no y.
double loss(const SsdCall& call, const SsdOptions& options) {
  const SsdResult r = reference::evaluate(call, options);
  return inner(r.y, call.dy) + inner(r.last_state, call.dlast_state);
}

TEST(SsdReferenceSmall, GradientsAgreeWithFiniteDifferences) {
  for (std::size_t row = 0; row < std::size(variants); ++row) {
    const Variant& variant = variants[row];
    const SsdOptions options = options_of(variant);
    SsdCall call = random_call(variant, row + 1);
    const SsdResult r = reference::evaluate(call, options);
    const std::pair<Values*, const Values*> pairs[] = {{&call.x, &r.dx},
                                                       {&call.dt, &r.ddt},
                                                       {&call.A, &r.dA},
                                                       {&call.B, &r.dB},
                                                       {&call.C, &r.dC},
                                                       {&call.D, &r.dD},
                                                       {&call.z, &r.dz},
                                                       {&call.dt_bias, &r.ddt_bias},
                                                       {&call.initial_state, &r.dinitial_state}};
    for (std::size_t which = 0; which < std::size(pairs); ++which) {
      const auto [input, gradient] = pairs[which];
      Values numeric(input->size());
      for (std::size_t index = 0; index < input->size(); ++index) {
        const double step = 1e-5, value = (*input)[index];
        (*input)[index] = value + step;
        const double up = loss(call, options);
        (*input)[index] = value - step;
        const double down = loss(call, options);
        (*input)[index] = value;
        numeric[index] = (up - down) / (2 * step);
      }
      // Differences are good to 1e-16 / step of the loss, here some tens, and to the square of the step.
      ASSERT_EQ(gradient->size(), numeric.size());
      if (!numeric.empty()) {
        EXPECT_TRUE(close(*gradient, numeric, 1e-8)) << "variant " << row << ", gradient " << which;
      }
    }
  }
}

// One head, P = S = 1, by hand.
TEST(SsdReferenceSmall, TwoTokensByHand) {
  const SsdCall call{.tokens = 2,
                     .seq_idx = {},
                     .x = {2, 3},
                     .dt = {0.5, 0.25},
                     .A = {-2},
                     .B = {1, -1},
                     .C = {4, 0.5},
                     .D = {10},
                     .initial_state = {8}};
  const SsdResult r = reference::evaluate(call, {});
  const double first = 8 * std::exp(-1) + 1, second = first * std::exp(-0.5) - 0.75;
  EXPECT_TRUE(close(r.y, {4 * first + 20, 0.5 * second + 30}, 1e-15));
  EXPECT_TRUE(close(r.last_state, {second}, 1e-15));
  SsdCall numbered = call;
  numbered.seq_idx = {0, 3};
  EXPECT_TRUE(close(reference::evaluate(numbered, {}).last_state, {-0.75}, 1e-15));
  numbered.seq_idx = {3, 3};
  EXPECT_TRUE(close(reference::evaluate(numbered, {}).last_state, {std::exp(-0.5) - 0.75}, 1e-15));
  SsdCall gated = call;
  gated.z = {0, 1};
  const double silu = 1 / (1 + std::exp(-1));
  EXPECT_TRUE(close(reference::evaluate(gated, {}).y, {0, silu * (0.5 * second + 30)}, 1e-15));
}

TEST(SsdReferenceSmall, LimitsHaveTheSlopeInsideAndNoneBeyond) {
  SsdCall call{.tokens = 4,
               .x = {1, 1, 1, 1},
               .dt = {0.25, 0.5, 0.2, 0.6},
               .A = {-1},
               .B = {1, 1, 1, 1},
               .C = {1, 1, 1, 1},
               .dy = {1, 1, 1, 1}};
  const SsdResult r = reference::evaluate(call, {.dt_min = 0.25, .dt_max = 0.5});
  EXPECT_NE(r.ddt[0], 0);
  EXPECT_NE(r.ddt[1], 0);
  EXPECT_EQ(r.ddt[2], 0);
  EXPECT_EQ(r.ddt[3], 0);
  call.dt = {0.25, 0.5, 0.25, 0.5};
  const SsdResult inside = reference::evaluate(call, {});
  EXPECT_TRUE(close(r.y, inside.y, 1e-15));
  EXPECT_EQ(r.ddt[0], inside.ddt[0]);
  EXPECT_EQ(r.ddt[1], inside.ddt[1]);
}

TEST(SsdReferenceSmall, TokensBehindTheLastSequenceHaveRowsOfZero) {
  const Variant variant{2, 1, true, true, true, 0, infinity, {0, 4}, {}};
  SsdCall call = random_call(variant, 3);
  const auto width = [&](const Values& x) { return x.size() / static_cast<std::size_t>(call.tokens); };
  for (Values* x : {&call.x, &call.dt, &call.B, &call.C, &call.z, &call.dy})
    std::fill_n(x->end() - static_cast<std::ptrdiff_t>(2 * width(*x)), 2 * width(*x), std::nan(""));
  const SsdResult r = reference::evaluate(call, options_of(variant));
  for (const Values* x : {&r.y, &r.dx, &r.ddt, &r.dB, &r.dC, &r.dz}) {
    const auto padding = x->end() - static_cast<std::ptrdiff_t>(2 * width(*x));
    EXPECT_EQ(std::count(padding, x->end(), 0), std::ssize(*x) / call.tokens * 2);
    EXPECT_TRUE(std::all_of(x->begin(), padding, [](double y) { return y != 0 && std::isfinite(y); }));
  }
}

TEST(SsdReferenceSmall, ANewNumberStartsAfresh) {
  const Variant variant{2, 0, false, false, false, 0, infinity, {}, {0, 0, 0, 1, 1, 1}};
  SsdCall call = random_call(variant, 5), other = call;
  const SsdResult r = reference::evaluate(call, {});
  for (double& x : other.initial_state) x += 1;
  for (double& x : other.dlast_state) x += 1;
  const SsdResult moved = reference::evaluate(other, {});
  EXPECT_TRUE(same_bits(moved.last_state, r.last_state)) << "a state went past the reset";
  EXPECT_TRUE(same_bits(moved.dinitial_state, r.dinitial_state)) << "a gradient went back past the reset";
  EXPECT_FALSE(same_bits(moved.y, r.y));
}

TEST(SsdReferenceSmall, NoTokensPassTheState) {
  const Variant variant{4, 0, false, false, false, 0, infinity, {0, 0, 0}, {}};
  const SsdCall call = random_call(variant, 5);
  const SsdResult r = reference::evaluate(call, {});
  EXPECT_TRUE(same_bits(r.last_state, call.initial_state));
  EXPECT_TRUE(same_bits(r.dinitial_state, call.dlast_state));
}

// What results are sums of is no smaller than they are, and no larger than dimensions make it.
TEST(SsdReferenceSmall, TermsBoundWhatTheyAreTermsOf) {
  const Variant variant{4, 2, true, false, false, 0, infinity, {}, {}};
  const SsdCall call = random_call(variant, 9);
  const SsdResult r = reference::evaluate(call, {});
  const auto expect = [](const Values& x, double terms, double most) {
    const double size = std::sqrt(inner(x, x));
    EXPECT_LE(size, terms * std::sqrt(2) * 1.0001);  // of two parts
    EXPECT_GE(size * most, terms);
  };
  expect(r.y, r.terms.y, 10);
  expect(r.ungated, r.terms.ungated, 10);
  expect(r.dz, r.terms.dz, 10);
  expect(r.dx, r.terms.dx, 10);
  expect(r.dB, r.terms.dB, 10);
  expect(r.dC, r.terms.dC, 10);
  expect(r.ddt, r.terms.ddt, 36);
}

}  // namespace
}  // namespace tfla::test
