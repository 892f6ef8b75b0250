// The float64 reference itself: against finite differences, against the sum it stands for, and at extreme gates.
#include "reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <ostream>
#include <string>

#include "reference/regimes.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::Head;
using reference::HeadResult;
using reference::Stream;

constexpr double infinity = std::numeric_limits<double>::infinity();

double log_sigmoid(double x) { return -std::log1p(std::exp(-std::abs(x))) + std::min(x, 0.0); }

double log_input(double x, const MlstmOptions& options) {
  return options.gate == InputGate::sigmoid ? log_sigmoid(x) : x;
}

double log_forget(double x, const MlstmOptions& options) { return options.gate == InputGate::log ? x : log_sigmoid(x); }

// A head with normals times `spread` in the gates (i centred on -1, f on 1) and everything optional given.
Head random_head(std::int64_t T, std::int64_t dqk, std::int64_t dhv, double spread, std::uint64_t seed) {
  const auto draw = [&](Stream stream, std::int64_t count, double factor = 1, double center = 0) {
    Values values(static_cast<std::size_t>(count));
    for (std::size_t index = 0; index < values.size(); ++index) {
      values[index] = center + factor * reference::normal(seed, stream, static_cast<std::int64_t>(index));
    }
    return values;
  };
  Head head;
  head.tokens = T;
  head.dqk = dqk;
  head.dhv = dhv;
  head.q = draw(Stream::q, T * dqk);
  head.k = draw(Stream::k, T * dqk);
  head.v = draw(Stream::v, T * dhv);
  head.i = draw(Stream::i, T, spread, -1);
  head.f = draw(Stream::f, T, spread, 1);
  head.C0 = draw(Stream::C0, dqk * dhv);
  head.n0 = draw(Stream::n0, dqk);
  head.m0 = 0.3;
  head.dh = draw(Stream::dh, T * dhv);
  head.dC_last = draw(Stream::dC_last, dqk * dhv);
  head.dn_last = draw(Stream::dn_last, dqk);
  return head;
}

double inner(const Values& x, const Values& y) {
  double sum = 0;
  for (std::size_t index = 0; index < x.size(); ++index) sum += x[index] * y[index];
  return sum;
}

// log of the weight of token j (or, for j = -1, of the initial state) in the state after token t, in true scale.
double log_weight(const Head& head, const MlstmOptions& options, std::int64_t t, std::int64_t j) {
  double sum = j < 0 ? head.m0 : log_input(head.i[static_cast<std::size_t>(j)], options);
  for (std::int64_t s = j + 1; s <= t; ++s) sum += log_forget(head.f[static_cast<std::size_t>(s)], options);
  return sum;
}

double max_state(const Head& head, const MlstmOptions& options, std::int64_t t) {
  if (options.gate != InputGate::exponential) return 0;
  double m = -infinity;
  for (std::int64_t j = -1; j <= t; ++j) m = std::max(m, log_weight(head, options, t, j));
  return m;
}

struct Variant {
  InputGate gate;
  Normalizer normalizer;
  bool exact;
  bool soft_cap;
};

std::string text(const Variant& v) {
  return std::string(v.gate == InputGate::exponential ? "exp"
                     : v.gate == InputGate::sigmoid   ? "sig"
                                                      : "log") +
         (v.normalizer == Normalizer::max ? "max" : "none") + (v.exact ? "_exact" : "") + (v.soft_cap ? "_cap" : "");
}

void PrintTo(const Variant& v, std::ostream* out) { *out << text(v); }

std::string variant_name(const ::testing::TestParamInfo<Variant>& info) { return text(info.param); }

class FiniteDifferencesSmall : public ::testing::TestWithParam<Variant> {
 protected:
  // The loss whose gradient the reference claims to be. Unless exact, the denominator is held at its value for the
  // unperturbed head, in true scale; the max states only fix scales, so they are held there too.
  double loss(const Head& head, const Head& base, const HeadResult& at_base, const MlstmOptions& options) const {
    Head forward_only = head;
    forward_only.dh.clear();
    MlstmOptions numerator = options;
    numerator.normalizer = Normalizer::none;
    const HeadResult r = reference::evaluate(forward_only, GetParam().exact ? options : numerator);
    Head base_only = base;
    base_only.dh.clear();
    const HeadResult base_numerator = reference::evaluate(base_only, numerator);
    double sum = 0;
    for (std::int64_t t = 0; t < head.tokens; ++t) {
      double factor = 1;
      if (!GetParam().exact) {
        const auto first = static_cast<std::size_t>(t * head.dhv);
        factor = std::exp(max_state(capped(head), options, t) - max_state(capped(base), options, t)) *
                 at_base.h[first] / base_numerator.h[first];
      }
      for (std::int64_t c = 0; c < head.dhv; ++c) {
        const auto index = static_cast<std::size_t>(t * head.dhv + c);
        sum += factor * r.h[index] * head.dh[index];
      }
    }
    return sum + std::exp(r.m - at_base.m) * (inner(r.C, head.dC_last) + inner(r.n, head.dn_last));
  }

  static Head capped(Head head) {
    if (GetParam().soft_cap) {
      for (Values* gates : {&head.i, &head.f}) {
        for (double& x : *gates) x = cap * std::tanh(x / cap);
      }
    }
    return head;
  }

  static constexpr double cap = 2.5;
};

TEST_P(FiniteDifferencesSmall, AgreeWithGradients) {
  const Variant& variant = GetParam();
  MlstmOptions options{
      .gate = variant.gate, .normalizer = variant.normalizer, .qk_scale = 0.7, .exact_normalizer_grad = variant.exact};
  // With the exponential gate eps is added in the stabilised scale: an exact gradient would see m through it.
  options.eps = variant.gate == InputGate::exponential && variant.exact ? 0 : 1e-2;
  if (variant.soft_cap) options.soft_cap = cap;
  for (const auto& [tokens, spread] : {std::pair(7, 1.5), std::pair(1, 1.0), std::pair(11, 2.0)}) {
    Head head = random_head(tokens, 3, 4, spread, 11);
    const HeadResult r = reference::evaluate(head, options);
    const Head base = head;
    const std::pair<Values*, const Values*> pairs[] = {{&head.q, &r.dq},  {&head.k, &r.dk}, {&head.v, &r.dv},
                                                       {&head.i, &r.di},  {&head.f, &r.df}, {&head.C0, &r.dC0},
                                                       {&head.n0, &r.dn0}};
    for (std::size_t which = 0; which < std::size(pairs); ++which) {
      auto [input, gradient] = pairs[which];
      Values numeric(input->size());
      for (std::size_t index = 0; index < input->size(); ++index) {
        const double step = 1e-6, value = (*input)[index];
        (*input)[index] = value + step;
        const double up = loss(head, base, r, options);
        (*input)[index] = value - step;
        const double down = loss(head, base, r, options);
        (*input)[index] = value;
        numeric[index] = (up - down) / (2 * step);
      }
      // The differences themselves are good to about 1e-16 / step = 1e-10 of the loss, here some tens.
      EXPECT_TRUE(close(*gradient, numeric, 2e-6)) << "gradient " << which << ", " << tokens << " tokens";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, FiniteDifferencesSmall,
                         ::testing::Values(Variant{InputGate::exponential, Normalizer::max, false, false},
                                           Variant{InputGate::exponential, Normalizer::max, true, false},
                                           Variant{InputGate::exponential, Normalizer::max, true, true},
                                           Variant{InputGate::exponential, Normalizer::none, false, false},
                                           Variant{InputGate::exponential, Normalizer::none, false, true},
                                           Variant{InputGate::sigmoid, Normalizer::none, false, false},
                                           Variant{InputGate::sigmoid, Normalizer::none, true, true},
                                           Variant{InputGate::sigmoid, Normalizer::max, false, true},
                                           Variant{InputGate::sigmoid, Normalizer::max, true, false},
                                           Variant{InputGate::log, Normalizer::none, false, false},
                                           Variant{InputGate::log, Normalizer::max, true, true}),
                         variant_name);

// h as the sum it stands for, each weight from its own sum of logarithms: no recurrence, nothing that can cancel.
Values h_by_sums(const Head& head, const MlstmOptions& options, bool max_normalizer) {
  const double scale = 1 / std::sqrt(static_cast<double>(head.dqk));
  Values h;
  for (std::int64_t t = 0; t < head.tokens; ++t) {
    const double m = max_state(head, options, t);
    const auto q = [&](std::int64_t r) { return scale * head.q[static_cast<std::size_t>(t * head.dqk + r)]; };
    Values numerator(static_cast<std::size_t>(head.dhv));
    double qn = 0;
    for (std::int64_t j = -1; j <= t; ++j) {
      const double weight = std::exp(log_weight(head, options, t, j) - m);
      for (std::int64_t r = 0; r < head.dqk; ++r) {
        const auto at = static_cast<std::size_t>(j < 0 ? r : j * head.dqk + r);
        const double key = j < 0 ? head.n0[at] : head.k[at];
        qn += weight * q(r) * key;
        for (std::size_t c = 0; c < numerator.size(); ++c) {
          const auto dhv = numerator.size();
          const double value = j < 0 ? head.C0[at * dhv + c] : key * head.v[static_cast<std::size_t>(j) * dhv + c];
          numerator[c] += weight * q(r) * value;
        }
      }
    }
    const double den = max_normalizer ? std::max(std::abs(qn), std::exp(-m)) + options.eps : 1;
    for (double x : numerator) h.push_back(x / den);
  }
  return h;
}

TEST(ReferenceSmall, EqualsTheSumForAnyGates) {
  const double extremes[] = {1e4, -1e4, -infinity, 0.5, -3, 20};
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid, InputGate::log}) {
    const double highest = gate == InputGate::log ? 0.5 : infinity;  // weights in log space are taken as they come
    for (const Normalizer normalizer : {Normalizer::max, Normalizer::none}) {
      for (std::uint64_t pattern = 0; pattern < 200; ++pattern) {
        Head head = random_head(9, 3, 2, 1, pattern);
        for (std::size_t t = 0; t < head.f.size(); ++t) {
          const std::uint64_t bits = reference::mix(pattern * 64 + t);
          head.f[t] = std::min(extremes[bits % 6], highest);
          const double input = std::min(extremes[bits / 6 % 6], highest);
          head.i[t] = input == -infinity ? 1 : input;
        }
        const MlstmOptions options{.gate = gate, .normalizer = normalizer};
        const HeadResult r = reference::evaluate(head, options);
        ASSERT_TRUE(close(r.h, h_by_sums(head, options, normalizer == Normalizer::max), 1e-12)) << pattern;
        for (const Values* values : {&r.C, &r.n, &r.dq, &r.dk, &r.dv, &r.di, &r.df, &r.dC0, &r.dn0}) {
          ASSERT_TRUE(std::all_of(values->begin(), values->end(), [](double x) { return std::isfinite(x); }))
              << pattern;
        }
      }
    }
  }
}

TEST(ReferenceSmall, FullResetStartsAfresh) {
  Head head = random_head(10, 3, 4, 1, 5);
  head.f[6] = -infinity;
  const HeadResult whole = reference::evaluate(head, {});
  Head tail = random_head(4, 3, 4, 1, 5);
  const auto last = [](const Values& x, std::ptrdiff_t width) { return Values(x.end() - 4 * width, x.end()); };
  tail.q = last(head.q, 3);
  tail.k = last(head.k, 3);
  tail.v = last(head.v, 4);
  tail.i = last(head.i, 1);
  tail.f = last(head.f, 1);
  tail.dh = last(head.dh, 4);
  tail.f[0] = 0;  // without a state it has nothing to forget
  tail.C0.clear();
  tail.n0.clear();
  // Any scale below that of the first token: what it kept of an empty state must not set the maximum.
  tail.m0 = -1e3;
  const HeadResult alone = reference::evaluate(tail, {});
  EXPECT_TRUE(same_bits(last(whole.h, 4), alone.h));
  EXPECT_TRUE(same_bits(last(whole.dk, 3), alone.dk));
  EXPECT_TRUE(same_bits(whole.C, alone.C));
  EXPECT_EQ(whole.df[6], 0);
  for (double& x : head.dC_last) x += 1;
  EXPECT_TRUE(same_bits(reference::evaluate(head, {}).dC0, whole.dC0)) << "a gradient went back past the reset";
}

TEST(ReferenceSmall, NoTokensPassTheState) {
  Head head = random_head(0, 3, 4, 1, 5);
  const HeadResult r = reference::evaluate(head, {});
  EXPECT_TRUE(same_bits(r.C, head.C0));
  EXPECT_TRUE(same_bits(r.n, head.n0));
  EXPECT_EQ(r.m, head.m0);
  EXPECT_TRUE(same_bits(r.dC0, head.dC_last));
  EXPECT_TRUE(same_bits(r.dn0, head.dn_last));
}

}  // namespace
}  // namespace tfla::test
