// The float64 reference of the delta rule itself: against the executable specification and finite differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <ostream>
#include <string>
#include <utility>

#include "reference/delta.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::DeltaCall;
using reference::DeltaHead;
using reference::DeltaHeadResult;
using reference::DeltaResult;

constexpr double infinity = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------- the specification

struct SpecCase {
  std::uint64_t seed;
  std::int64_t T, dqk, dhv, chunk_size;
  bool gated, states, resets;
  Values h, C, dq, dk, dv, dbeta, dg, dC0;
};

void PrintTo(const SpecCase& spec, std::ostream* out) { *out << "seed " << spec.seed; }

const SpecCase spec_cases[] = {
#include "tests/delta/delta_cases.inc"
};

// The twin of `numbers` in make_delta_cases.py.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}

  Values draw(std::int64_t count, double factor = 1, double center = 0) {
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

// The inputs of a case; `reset` stands where it has resets.
DeltaHead inputs(const SpecCase& spec, double reset) {
  Numbers numbers(spec.seed);
  DeltaHead head;
  head.tokens = spec.T;
  head.dqk = spec.dqk;
  head.dhv = spec.dhv;
  head.q = numbers.draw(spec.T * spec.dqk, 2);
  head.k = numbers.draw(spec.T * spec.dqk);
  head.v = numbers.draw(spec.T * spec.dhv, 2);
  head.beta = numbers.draw(spec.T, 1, 1);
  head.g = numbers.draw(spec.T, 1, -1);
  head.dh = numbers.draw(spec.T * spec.dhv, 2);
  if (spec.resets) {
    for (std::size_t t = 0; t < head.g.size(); t += 3) head.g[t] = reset;
  }
  if (spec.states) {
    head.C0 = numbers.draw(spec.dqk * spec.dhv, 2);
    head.dC_last = numbers.draw(spec.dqk * spec.dhv, 2);
  }
  return head;
}

class DeltaSpecSmall : public ::testing::TestWithParam<SpecCase> {};

TEST_P(DeltaSpecSmall, ReferenceAgrees) {
  const SpecCase& spec = GetParam();
  for (const double reset : {-1e4, -infinity}) {
    for (const bool zeros : {false, true}) {
      DeltaHead head = inputs(spec, reset);
      if (!spec.gated) head.g = zeros ? Values(head.g.size(), 0) : Values{};
      const DeltaHeadResult r = reference::evaluate(head, {});
      const Snapshot actual{{"h", r.h},   {"C", r.C},         {"dq", r.dq}, {"dk", r.dk},
                            {"dv", r.dv}, {"dbeta", r.dbeta}, {"dg", r.dg}, {"dC0", r.dC0}};
      Snapshot expected{{"h", spec.h},   {"C", spec.C},         {"dq", spec.dq}, {"dk", spec.dk},
                        {"dv", spec.dv}, {"dbeta", spec.dbeta}, {"dg", spec.dg}, {"dC0", spec.dC0}};
      if (head.g.empty()) expected["dg"] = Values(spec.dg.size(), 0);  // of a decay that there is not
      for (const auto& [name, values] : expected)
        EXPECT_TRUE(close(actual.at(name), values, 1e-12)) << name << ", reset " << reset;
    }
  }
}

TEST_P(DeltaSpecSmall, LibraryAgrees) {
  const SpecCase& spec = GetParam();
  const std::int64_t T = spec.T, dqk = spec.dqk, dhv = spec.dhv;
  const DeltaHead head = inputs(spec, -infinity);
  const auto of = [](const Values& x, std::initializer_list<std::int64_t> shape) {
    return x.empty() ? TensorView() : TensorView(x.data(), DType::float64, shape);
  };
  const auto into = [](Values& x, std::initializer_list<std::int64_t> shape) {
    x.assign(std::accumulate(shape.begin(), shape.end(), std::size_t{1},
                             [](std::size_t product, std::int64_t n) { return product * static_cast<std::size_t>(n); }),
             std::numeric_limits<double>::quiet_NaN());
    return MutableTensorView(x.data(), DType::float64, shape);
  };
  Values h, C, dq, dk, dv, dbeta, dg, dC0;
  const TensorView q = of(head.q, {1, T, 1, dqk}), k = of(head.k, {1, T, 1, dqk}), v = of(head.v, {1, T, 1, dhv});
  const TensorView beta = of(head.beta, {1, T, 1}), g = spec.gated ? of(head.g, {1, T, 1}) : TensorView();
  const TensorView initial = of(head.C0, {1, 1, dqk, dhv});
  const DeltaOptions options{.chunk_size = spec.chunk_size};
  delta_forward({.q = q,
                 .k = k,
                 .v = v,
                 .beta = beta,
                 .g = g,
                 .h = into(h, {1, T, 1, dhv}),
                 .initial_state = initial,
                 .last_state = into(C, {1, 1, dqk, dhv}),
                 .options = options});
  delta_backward({.q = q,
                  .k = k,
                  .v = v,
                  .beta = beta,
                  .g = g,
                  .dh = of(head.dh, {1, T, 1, dhv}),
                  .dq = into(dq, {1, T, 1, dqk}),
                  .dk = into(dk, {1, T, 1, dqk}),
                  .dv = into(dv, {1, T, 1, dhv}),
                  .dbeta = into(dbeta, {1, T, 1}),
                  .dg = spec.gated ? into(dg, {1, T, 1}) : MutableTensorView(),
                  .initial_state = initial,
                  .dlast_state = of(head.dC_last, {1, 1, dqk, dhv}),
                  .dinitial_state = into(dC0, {1, 1, dqk, dhv}),
                  .options = options});
  EXPECT_TRUE(close(h, spec.h, 1e-10));
  EXPECT_TRUE(close(C, spec.C, 1e-10));
  EXPECT_TRUE(close(dq, spec.dq, 1e-10));
  EXPECT_TRUE(close(dk, spec.dk, 1e-10));
  EXPECT_TRUE(close(dv, spec.dv, 1e-10));
  EXPECT_TRUE(close(dbeta, spec.dbeta, 1e-10));
  if (spec.gated) {
    EXPECT_TRUE(close(dg, spec.dg, 1e-10));
  }
  EXPECT_TRUE(close(dC0, spec.dC0, 1e-10));
}

std::string spec_name(const ::testing::TestParamInfo<SpecCase>& tested) {
  const SpecCase& spec = tested.param;
  std::string text("T");
  text += std::to_string(spec.T);
  text += "_L";
  text += std::to_string(spec.chunk_size);
  if (spec.gated) text += "_gated";
  if (spec.states) text += "_states";
  if (spec.resets) text += "_resets";
  return text;
}

INSTANTIATE_TEST_SUITE_P(Delta, DeltaSpecSmall, ::testing::ValuesIn(spec_cases), spec_name);

// ---------------------------------------------------------------- finite differences

enum class Decay : std::uint8_t { none, plain, rate, biased };  // no g; g; with A_log; with dt_bias too

struct Variant {
  WriteGate write;
  bool normalize;
  Decay decay;
  std::int64_t qk_heads;
  std::vector<std::int64_t> cu_seqlens;
  std::optional<double> qk_scale = {};
};

const Variant variants[] = {{WriteGate::plain, false, Decay::none, 4, {}},
                            {WriteGate::plain, false, Decay::plain, 4, {}, 0.7},
                            {WriteGate::sigmoid, false, Decay::rate, 2, {}},
                            {WriteGate::twice_sigmoid, true, Decay::biased, 1, {}},
                            {WriteGate::sigmoid, true, Decay::plain, 2, {0, 3, 3, 4}, -1.3},
                            {WriteGate::plain, true, Decay::biased, 4, {0, 0, 1, 6}},
                            {WriteGate::twice_sigmoid, false, Decay::rate, 1, {0, 5}}};

DeltaCall random_call(const Variant& variant, std::uint64_t seed) {
  Numbers numbers(seed);
  DeltaCall call{.batch = variant.cu_seqlens.empty() ? 2 : 1,
                 .tokens = 6,
                 .qk_heads = variant.qk_heads,
                 .heads = 4,
                 .dqk = 3,
                 .dhv = 2,
                 .cu_seqlens = variant.cu_seqlens};
  const std::int64_t rows = call.batch * call.tokens, states = call.sequences() * call.heads * call.dqk * call.dhv;
  call.q = numbers.draw(rows * call.qk_heads * call.dqk, 2);
  call.k = numbers.draw(rows * call.qk_heads * call.dqk);
  call.v = numbers.draw(rows * call.heads * call.dhv, 2);
  call.beta = numbers.draw(rows * call.heads, 1, 1);
  call.dh = numbers.draw(rows * call.heads * call.dhv, 2);
  call.initial_state = numbers.draw(states, 2);
  call.dlast_state = numbers.draw(states, 2);
  const bool rate = variant.decay == Decay::rate || variant.decay == Decay::biased;
  if (variant.decay != Decay::none) call.g = numbers.draw(rows * call.heads, 1, rate ? 0 : -1);
  if (rate) call.A_log = numbers.draw(call.heads);
  if (variant.decay == Decay::biased) call.dt_bias = numbers.draw(call.heads, 2);
  return call;
}

double inner(const Values& x, const Values& y) { return std::inner_product(x.begin(), x.end(), y.begin(), 0.0); }

// The functional that the gradients are of. Tokens behind the last sequence have no h.
double loss(const DeltaCall& call, const DeltaOptions& options) {
  const DeltaResult r = reference::evaluate(call, options);
  return inner(r.h, call.dh) + inner(r.last_state, call.dlast_state);
}

TEST(DeltaReferenceSmall, GradientsAgreeWithFiniteDifferences) {
  for (std::size_t row = 0; row < std::size(variants); ++row) {
    const Variant& variant = variants[row];
    const DeltaOptions options{.write = variant.write, .normalize_qk = variant.normalize, .qk_scale = variant.qk_scale};
    DeltaCall call = random_call(variant, row + 1);
    const DeltaResult r = reference::evaluate(call, options);
    const std::pair<Values*, const Values*> pairs[] = {{&call.q, &r.dq},
                                                       {&call.k, &r.dk},
                                                       {&call.v, &r.dv},
                                                       {&call.beta, &r.dbeta},
                                                       {&call.g, &r.dg},
                                                       {&call.A_log, &r.dA_log},
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
      if (!numeric.empty()) {
        EXPECT_TRUE(close(*gradient, numeric, 1e-8)) << "variant " << row << ", gradient " << which;
      }
    }
  }
}

// ---------------------------------------------------------------- what must hold exactly

TEST(DeltaReferenceSmall, TokensBehindTheLastSequenceHaveRowsOfZero) {
  const Variant variant{WriteGate::plain, false, Decay::plain, 2, {0, 4}};
  DeltaCall call = random_call(variant, 3);
  const auto width = [&](const Values& x) { return x.size() / static_cast<std::size_t>(call.tokens); };
  for (Values* x : {&call.q, &call.k, &call.v, &call.beta, &call.g, &call.dh})
    std::fill_n(x->end() - static_cast<std::ptrdiff_t>(2 * width(*x)), 2 * width(*x), std::nan(""));
  const DeltaResult r = reference::evaluate(call, {});
  for (const Values* x : {&r.h, &r.dq, &r.dk, &r.dv, &r.dbeta, &r.dg}) {
    const auto padding = x->end() - static_cast<std::ptrdiff_t>(2 * width(*x));
    EXPECT_EQ(std::count(padding, x->end(), 0), std::ssize(*x) / call.tokens * 2);
    EXPECT_TRUE(std::all_of(x->begin(), padding, [](double y) { return y != 0 && std::isfinite(y); }));
  }
}

TEST(DeltaReferenceSmall, AResetStartsAfresh) {
  const Variant variant{WriteGate::plain, false, Decay::plain, 4, {}};
  DeltaCall call = random_call(variant, 5);
  for (std::size_t row = 0; row < 2; ++row) {  // the fourth token of all heads
    for (std::size_t head = 0; head < 4; ++head) call.g[(row * 6 + 3) * 4 + head] = -infinity;
  }
  const DeltaResult r = reference::evaluate(call, {});
  for (const Values* x : {&r.h, &r.last_state, &r.dq, &r.dk, &r.dv, &r.dbeta, &r.dg, &r.dinitial_state})
    EXPECT_TRUE(std::all_of(x->begin(), x->end(), [](double y) { return std::isfinite(y); }));
  DeltaCall other = call;
  for (double& x : other.initial_state) x += 1;
  for (double& x : other.dlast_state) x += 1;
  const DeltaResult moved = reference::evaluate(other, {});
  EXPECT_TRUE(same_bits(moved.last_state, r.last_state)) << "a state went past the reset";
  EXPECT_TRUE(same_bits(moved.dinitial_state, r.dinitial_state)) << "a gradient went back past the reset";
  EXPECT_FALSE(same_bits(moved.h, r.h));
  EXPECT_EQ(r.dg[3 * 4], 0);
  EXPECT_NE(r.dg[4 * 4], 0);
}

TEST(DeltaReferenceSmall, NoTokensPassTheState) {
  const Variant variant{WriteGate::plain, false, Decay::plain, 4, {0, 0, 0}};
  const DeltaCall call = random_call(variant, 5);
  const DeltaResult r = reference::evaluate(call, {});
  EXPECT_TRUE(same_bits(r.last_state, call.initial_state));
  EXPECT_TRUE(same_bits(r.dinitial_state, call.dlast_state));
}

// dgamma_t - dgamma_{t+1} = q.dq - v.dv, and dgamma is no larger than its two factors.
TEST(DeltaReferenceSmall, DecayGradientsAreSumsOfTheirTerms) {
  const SpecCase& spec = spec_cases[5];
  const DeltaHead head = inputs(spec, -infinity);
  const DeltaHeadResult r = reference::evaluate(head, {});
  double sum = inner(r.C, head.dC_last);
  Values summed(r.dg.size());
  for (std::size_t t = summed.size(); t-- > 0;) {
    const auto dqk = static_cast<std::size_t>(spec.dqk), dhv = static_cast<std::size_t>(spec.dhv);
    for (std::size_t x = t * dqk; x < (t + 1) * dqk; ++x) sum += head.q[x] * r.dq[x];
    for (std::size_t x = t * dhv; x < (t + 1) * dhv; ++x) sum -= head.v[x] * r.dv[x];
    summed[t] = sum;
  }
  EXPECT_TRUE(close(r.dg, summed, 1e-12));
  const double squares = inner(r.dg, r.dg), dims = static_cast<double>(spec.dqk * spec.dhv);
  EXPECT_LE(squares, r.dg_terms);
  EXPECT_GE(squares * dims * dims, r.dg_terms);
}

}  // namespace
}  // namespace tfla::test
