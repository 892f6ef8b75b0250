// What `tfla analyse transfer` rests on: a column of ones beside v carries q.n through the library, so normalizers can
// be applied afterwards.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/regimes.h"
#include "tfla/tfla.h"

namespace tfla::test {
namespace {

TEST(TransferSmall, ColumnOfOnesIsTheNormalizer) {
  constexpr std::int64_t tokens = 70, dqk = 12, dhv = 9, columns = dhv + 1;
  std::vector<double> q(tokens * dqk), k(tokens * dqk), v(tokens * columns, 1.0);
  for (std::int64_t x = 0; x < tokens * dqk; ++x) {
    q[x] = reference::normal(1, reference::Stream::q, x);
    k[x] = reference::normal(1, reference::Stream::k, x);
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t x = 0; x < dhv; ++x) v[t * columns + x] = reference::normal(1, reference::Stream::v, t * dhv + x);
  }
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
    for (const double i : {-6.0, 0.0, 3.0}) {
      for (const double f : {-3.0, 5.0}) {
        const std::vector<double> C(dqk * columns), n(dqk);
        const double m = gate == InputGate::exponential ? i : 0.0;  // constant gates keep it there
        const auto run = [&](Normalizer normalizer) {
          std::vector<double> h(tokens * columns);
          forward({.q = {q.data(), DType::float64, {1, tokens, 1, dqk}},
                   .k = {k.data(), DType::float64, {1, tokens, 1, dqk}},
                   .v = {v.data(), DType::float64, {1, tokens, 1, columns}},
                   .i = {&i, DType::float64, {1, tokens, 1}, {0, 0, 1}},
                   .f = {&f, DType::float64, {1, tokens, 1}, {0, 0, 1}},
                   .h = {h.data(), DType::float64, {1, tokens, 1, columns}},
                   .initial_state = {.C = {C.data(), DType::float64, {1, 1, dqk, columns}},
                                     .n = {n.data(), DType::float64, {1, 1, dqk}},
                                     .m = {&m, DType::float64, {1, 1}}},
                   .options = {.gate = gate, .normalizer = normalizer, .eps = 0}},
                  {.threads = 1});
          return h;
        };
        const std::vector<double> plain = run(Normalizer::none);
        const std::vector<double> normalized = run(Normalizer::max);
        for (std::int64_t t = 0; t < tokens; ++t) {
          const double denominator = std::max(std::abs(plain[t * columns + dhv]), std::exp(-m));
          for (std::int64_t x = 0; x < columns; ++x) {
            const double expected = plain[t * columns + x] / denominator;
            EXPECT_NEAR(normalized[t * columns + x], expected, 1e-10 * (1 + std::abs(expected)));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tfla::test
