// Numbers of the executable specification, for the float64 reference and for the library in float64.
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>

#include "reference/reference.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

struct SpecCase {
  std::uint64_t seed;
  InputGate gate;
  Normalizer normalizer;
  bool state;  // initial state in, gradient of the last state in
  bool exact_normalizer_grad;
  std::int64_t T, dqk, dhv, chunk_size;
  Values h, C, n, m, dq, dk, dv, di, df, dC0, dn0;
};

void PrintTo(const SpecCase& spec, std::ostream* out) { *out << "seed " << spec.seed; }

const SpecCase spec_cases[] = {
#include "tests/accuracy/spec_cases.inc"
};

// The twin of `numbers` in make_spec_cases.py.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}

  Values draw(std::int64_t count, double factor, double center = 0) {
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

reference::Head inputs(const SpecCase& spec) {
  Numbers numbers(spec.seed);
  reference::Head head;
  head.tokens = spec.T;
  head.dqk = spec.dqk;
  head.dhv = spec.dhv;
  head.q = numbers.draw(spec.T * spec.dqk, 2);
  head.k = numbers.draw(spec.T * spec.dqk, 2);
  head.v = numbers.draw(spec.T * spec.dhv, 2);
  head.i = numbers.draw(spec.T, 4);
  head.f = numbers.draw(spec.T, 4, 1);
  head.dh = numbers.draw(spec.T * spec.dhv, 2);
  if (!spec.state) return head;
  head.C0 = numbers.draw(spec.dqk * spec.dhv, 2);
  head.n0 = numbers.draw(spec.dqk, 2);
  head.m0 = numbers.draw(1, 1).front();
  head.dC_last = numbers.draw(spec.dqk * spec.dhv, 2);
  head.dn_last = numbers.draw(spec.dqk, 2);
  return head;
}

MlstmOptions options(const SpecCase& spec) {
  return {.gate = spec.gate,
          .normalizer = spec.normalizer,
          .eps = 0,
          .exact_normalizer_grad = spec.exact_normalizer_grad,
          .chunk_size = spec.chunk_size};
}

std::string spec_name(const ::testing::TestParamInfo<SpecCase>& info) {
  const SpecCase& spec = info.param;
  return std::string(spec.gate == InputGate::exponential ? "exp" : "sig") +
         (spec.normalizer == Normalizer::max ? "max" : "none") + "_T" + std::to_string(spec.T) + "_L" +
         std::to_string(spec.chunk_size) + (spec.state ? "_state" : "") + (spec.exact_normalizer_grad ? "_exact" : "");
}

class SpecSmall : public ::testing::TestWithParam<SpecCase> {};

TEST_P(SpecSmall, ReferenceAgrees) {
  const SpecCase& spec = GetParam();
  const reference::HeadResult r = reference::evaluate(inputs(spec), options(spec));
  const Snapshot actual{{"h", r.h},   {"C", r.C},   {"n", r.n},   {"m", {r.m}},   {"dq", r.dq},  {"dk", r.dk},
                        {"dv", r.dv}, {"di", r.di}, {"df", r.df}, {"dC0", r.dC0}, {"dn0", r.dn0}};
  const Snapshot expected{{"h", spec.h},   {"C", spec.C},     {"n", spec.n},    {"m", spec.m},
                          {"dq", spec.dq}, {"dk", spec.dk},   {"dv", spec.dv},  {"di", spec.di},
                          {"df", spec.df}, {"dC0", spec.dC0}, {"dn0", spec.dn0}};
  for (const auto& [name, values] : expected) EXPECT_TRUE(close(actual.at(name), values, 1e-12)) << name;
}

TEST_P(SpecSmall, LibraryAgrees) {
  const SpecCase& spec = GetParam();
  const reference::Head head = inputs(spec);
  const MlstmShape shape{
      .tokens = spec.T, .dqk = spec.dqk, .dhv = spec.dhv, .dtype = DType::float64, .gate_dtype = DType::float64};
  for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
    MlstmOptions chosen = options(spec);
    chosen.formulation = formulation;
    const bool with_backward = formulation != Formulation::recurrent;
    const testkit::Case description{.shape = shape,
                                    .cu_seqlens = {},
                                    .options = chosen,
                                    .initial_state = spec.state,
                                    .last_state_grad = spec.state};
    testkit::Problem problem(description);
    const MlstmForward& in = problem.forward();
    const MlstmBackward& grads = problem.backward();
    overwrite(in.q, head.q);
    overwrite(in.k, head.k);
    overwrite(in.v, head.v);
    overwrite(in.i, head.i);
    overwrite(in.f, head.f);
    overwrite(grads.dh, head.dh);
    if (spec.state) {
      overwrite(in.initial_state.C, head.C0);
      overwrite(in.initial_state.n, head.n0);
      overwrite(in.initial_state.m, {head.m0});
      overwrite(grads.dlast_state.C, head.dC_last);
      overwrite(grads.dlast_state.n, head.dn_last);
    }
    Snapshot expected{{"h", spec.h}, {"C", spec.C}, {"n", spec.n}, {"m", spec.m}};
    EXPECT_TRUE(close(run_forward(problem), expected, description)) << static_cast<int>(formulation);
    EXPECT_TRUE(close(snapshot(in).at("m"), spec.m, 1e-12)) << static_cast<int>(formulation);
    if (!with_backward) continue;
    expected = {{"dq", spec.dq}, {"dk", spec.dk}, {"dv", spec.dv}, {"di", spec.di}, {"df", spec.df}};
    if (spec.state) {
      expected["dC0"] = spec.dC0;
      expected["dn0"] = spec.dn0;
    }
    EXPECT_TRUE(close(run_backward(problem), expected, description)) << static_cast<int>(formulation);
  }
}

INSTANTIATE_TEST_SUITE_P(, SpecSmall, ::testing::ValuesIn(spec_cases), spec_name);

}  // namespace
}  // namespace tfla::test
