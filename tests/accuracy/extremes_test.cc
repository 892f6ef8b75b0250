// Gates at the ends of their range: plus and minus 1e4, full resets, closed inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "reference/regimes.h"
#include "reference/values.h"
#include "testkit/tensor.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using testkit::Case;
using testkit::gather;
using testkit::Problem;

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Extreme {
  const char* name;
  std::vector<double> input, forget;  // the values from which gates are drawn
  std::int64_t closed = 0;            // tokens at the beginning whose input gates are closed whatever was drawn
};

const Extreme extremes[] = {{"both_1e4", {1e4, -1e4, 0.5}, {1e4, -1e4, 0.5, 3}},
                            {"input_1e4", {1e4, -1e4}, {2}},
                            {"all_closed", {-1e4}, {-1e4}},
                            {"all_open", {1e4}, {1e4}},
                            {"forgets_all", {0.5, -2}, {-1e4, 3, 3, 3, 3}},
                            {"full_reset", {0.5, -2}, {-infinity, 3, 3, 3, 3}},
                            {"only_resets", {0.5, -2}, {-infinity}},
                            {"never_forgets", {0.5, -2}, {infinity, 3}},
                            {"no_input", {-infinity, 0.5}, {3, 1}},
                            {"no_input_in_a_block", {0.5, -2}, {3, 1}, 64}};

// Draws again, with everything above `highest` brought down to it.
void redraw(const TensorView& view, const std::vector<double>& values, std::uint64_t seed, double highest) {
  Values gates = gather(view);
  for (std::size_t index = 0; index < gates.size(); ++index) {
    gates[index] = std::min(values[reference::mix(seed + index) % values.size()], highest);
  }
  overwrite(view, gates);
}

void close_first(const TensorView& input_gates, std::int64_t tokens) {
  const TensorView first = slice(input_gates, 1, 0, tokens);
  overwrite(first, Values(static_cast<std::size_t>(reference::element_count(first)), -infinity));
}

// With large input gates q.n alone is the denominator, and where it nearly vanishes, an error would tell of that and
// not of the gates. With all of q, k and n positive it cannot.
void make_positive(const TensorView& view) {
  Values values = gather(view);
  for (double& x : values) x = std::abs(x);
  overwrite(view, values);
}

class ExtremesSmall : public ::testing::TestWithParam<std::tuple<std::size_t, InputGate, Normalizer, DType>> {
 protected:
  [[nodiscard]] static const Extreme& extreme() { return extremes[std::get<0>(GetParam())]; }

  [[nodiscard]] static Case description(std::int64_t chunk_size, Formulation formulation) {
    const DType dtype = std::get<3>(GetParam());
    Case c;
    c.shape = {.batch = 2,
               .tokens = 90,
               .qk_heads = 1,
               .heads = 2,
               .dqk = 8,
               .dhv = 12,
               .dtype = dtype,
               .gate_dtype = dtype == DType::float64 ? DType::float64 : DType::float32};
    c.options = {.gate = std::get<1>(GetParam()),
                 .normalizer = std::get<2>(GetParam()),
                 .chunk_size = chunk_size,
                 .formulation = formulation};
    c.initial_state = c.last_state_grad = true;
    return c;
  }

  // m is at most 1e4 here. Stored in float32 it is known to half a unit of its last place, and exp(m), the scale of C
  // and n, is as uncertain relatively as m is absolutely. Without a normalizer h is in that scale too, and all
  // gradients with it.
  static std::vector<testkit::TensorError> less_rounding_of_m(std::vector<testkit::TensorError> errors, const Case& c) {
    const double rounding = c.shape.dtype == DType::float64 ? 0 : 1e4 * 0x1p-24;
    const bool all = c.options.gate == InputGate::exponential && c.options.normalizer == Normalizer::none;
    for (testkit::TensorError& error : errors) {
      if (all || error.tensor == "C" || error.tensor == "n") error.relative -= std::min(error.relative, rounding);
    }
    return errors;
  }
};

TEST_P(ExtremesSmall, FiniteAndRight) {
  for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
    for (const std::int64_t chunk_size : {0, 1, 16}) {
      const Case c = description(chunk_size, formulation);
      Problem problem(c);
      // In log space weights are taken as they come: no decay above 1, no input above e^3.
      const bool log_space = c.options.gate == InputGate::log;
      redraw(problem.forward().i, extreme().input, 1, log_space ? 3 : infinity);
      redraw(problem.forward().f, extreme().forget, 2, log_space ? 0 : infinity);
      close_first(problem.forward().i, extreme().closed);
      make_positive(problem.forward().q);
      make_positive(problem.forward().k);
      make_positive(problem.forward().initial_state.n);
      const bool with_backward = formulation != Formulation::recurrent;
      const testkit::Judge judge(problem, with_backward);
      forward(problem.forward());
      EXPECT_TRUE(within_bounds(less_rounding_of_m(judge.forward_errors(), c), c)) << label(c);
      if (!with_backward) continue;
      backward(problem.backward());
      EXPECT_TRUE(within_bounds(less_rounding_of_m(judge.backward_errors(), c), c)) << label(c);
    }
  }
}

std::string extreme_name(const ::testing::TestParamInfo<ExtremesSmall::ParamType>& info) {
  const auto& [which, gate, normalizer, dtype] = info.param;
  return std::string(extremes[which].name) +
         (gate == InputGate::exponential ? "_exp"
          : gate == InputGate::sigmoid   ? "_sig"
                                         : "_log") +
         (normalizer == Normalizer::max ? "max_" : "none_") + name(dtype);
}

INSTANTIATE_TEST_SUITE_P(Gates, ExtremesSmall,
                         ::testing::Combine(::testing::Range(std::size_t{0}, std::size(extremes)),
                                            ::testing::Values(InputGate::exponential, InputGate::sigmoid,
                                                              InputGate::log),
                                            ::testing::Values(Normalizer::max, Normalizer::none),
                                            ::testing::Values(DType::float32, DType::float64, DType::bfloat16)),
                         extreme_name);

// A forget gate of minus infinity makes what follows a sequence of its own.
TEST(ResetSmall, EqualsANewSequence) {
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid, InputGate::log}) {
    Case c;
    c.shape = {.tokens = 60,
               .qk_heads = 2,
               .heads = 2,
               .dqk = 4,
               .dhv = 6,
               .dtype = DType::float64,
               .gate_dtype = DType::float64};
    // eps is added in the scale of m, which a new sequence starts at zero and a reset does not.
    c.options = {.gate = gate, .normalizer = Normalizer::max, .eps = 0};
    Problem whole(c);
    Values f = gather(whole.forward().f);
    for (const std::size_t head : {0U, 1U}) f[25 * 2 + head] = f[52 * 2 + head] = -infinity;
    overwrite(whole.forward().f, f);
    c.cu_seqlens = {0, 25, 52, 60};
    Problem cut(c);
    // Closed input gates beside the resets, which are so far below all open ones.
    Values i = gather(whole.forward().i);
    for (const std::size_t head : {0U, 1U}) i[10 * 2 + head] = i[40 * 2 + head] = -infinity;
    overwrite(whole.forward().i, i);
    overwrite(cut.forward().i, i);
    for (const std::size_t head : {0U, 1U}) f[25 * 2 + head] = f[52 * 2 + head] = -3;
    overwrite(cut.forward().f, f);
    Snapshot by_reset = run_both(whole), by_boundary = run_both(cut);
    for (const char* tensor : {"h", "dq", "dk", "dv", "di"}) {
      EXPECT_TRUE(close(by_reset.at(tensor), by_boundary.at(tensor), 1e-10)) << tensor;
    }
    double largest = 0;
    for (const double x : by_reset.at("df")) largest = std::max(largest, std::abs(x));
    for (const std::size_t reset : {25U * 2, 25U * 2 + 1, 52U * 2, 52U * 2 + 1}) {
      EXPECT_LE(std::abs(by_reset.at("df")[reset]), 1e-10 * largest);
    }
  }
}

// Not even of numbers so large that a rest of exp(-50) would show. The sums behind df are exact to the last digit of
// the largest gradient in its tile, so of df there is a claim about one side alone.
TEST(ResetSmall, NothingPassesIt) {
  constexpr std::int64_t reset = 70;
  constexpr double huge = 1e30;
  for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
    for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid, InputGate::log}) {
      for (const DType dtype : {DType::float32, DType::float64}) {
        Case c;
        c.shape = {.tokens = 150, .qk_heads = 1, .heads = 2, .dqk = 4, .dhv = 6, .dtype = dtype, .gate_dtype = dtype};
        c.options = {
            .gate = gate, .normalizer = Normalizer::max, .exact_normalizer_grad = true, .formulation = formulation};
        c.initial_state = c.last_state_grad = true;
        Problem problem(c);
        const MlstmForward& f = problem.forward();
        const MlstmBackward& b = problem.backward();
        const auto run = [&] {
          return formulation == Formulation::recurrent ? run_forward(problem) : run_both(problem);
        };
        const auto enlarge = [](const TensorView& view) {
          Values values = gather(view);
          for (double& x : values) x *= huge;
          overwrite(view, values);
        };
        // The part of some tensors on one side of the reset. States have no such sides.
        const auto part = [](const Snapshot& all, std::initializer_list<const char*> names, bool before) {
          Snapshot some;
          for (const char* name : names) {
            const auto found = all.find(name);
            if (found == all.end()) continue;
            const Values& values = found->second;
            const auto cut = static_cast<std::ptrdiff_t>(values.size() / 150 * reset);
            const bool state = std::string(name).find_first_of("Cnm") != std::string::npos;
            some[name] = state    ? values
                         : before ? Values(values.begin(), values.begin() + cut)
                                  : Values(values.begin() + cut, values.end());
          }
          return some;
        };
        const TensorView closed = slice(f.f, 1, reset, 1);
        overwrite(closed, Values(2, -infinity));
        const Snapshot clean = run();

        enlarge(slice(b.dh, 1, reset, 150 - reset));
        const auto earlier = {"dq", "dk", "dv", "di", "dC0", "dn0"};
        EXPECT_TRUE(same_bits(part(run(), earlier, true), part(clean, earlier, true))) << label(c);
        overwrite(slice(b.dh, 1, reset, 150 - reset), Values(static_cast<std::size_t>((150 - reset) * 2 * 6), 1));
        const Snapshot ones = run();

        enlarge(f.initial_state.C);
        enlarge(f.initial_state.n);
        enlarge(slice(f.v, 1, 0, reset));
        const auto later = {"h", "C", "n", "m", "dq", "dk", "dv", "di", "df"};
        EXPECT_TRUE(same_bits(part(run(), later, false), part(ones, later, false))) << label(c);
      }
    }
  }
}

// Near 1e4 a float32 max state is rounded by up to 5e-4. What it is rounded to is what C and n are scaled by, or one
// half of a sequence would hand the other a state that is off by as much.
TEST(LargeMaxSmall, ACutSequenceIsTheWholeOne) {
  constexpr std::int64_t tokens = 60;
  for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
    Case c;
    c.shape = {.tokens = tokens, .qk_heads = 2, .heads = 2, .dqk = 4, .dhv = 6};
    c.options = {.gate = InputGate::exponential, .normalizer = Normalizer::max, .formulation = formulation};
    Problem problem(c);
    const MlstmForward& whole = problem.forward();
    redraw(whole.i, {9999.3, 9998.7, 9999.9, 9997.1}, 1, infinity);
    redraw(whole.f, {0.5, 3, 1.25}, 2, infinity);
    make_positive(whole.q);
    make_positive(whole.k);
    const Snapshot expected = run_forward(problem);
    const auto part = [&](std::int64_t begin, std::int64_t count) {
      MlstmForward args = whole;
      for (TensorView* view : {&args.q, &args.k, &args.v, &args.i, &args.f}) *view = slice(*view, 1, begin, count);
      args.h = slice(args.h, 1, begin, count);
      return args;
    };
    for (const std::int64_t cut : {7, 18, 29, 30, 31, 44, 53}) {
      problem.poison();
      forward(part(0, cut));
      MlstmForward rest = part(cut, tokens - cut);
      rest.initial_state = {whole.last_state.C, whole.last_state.n, whole.last_state.m};
      forward(rest);
      EXPECT_TRUE(close(snapshot(whole).at("h"), expected.at("h"), 1e-5)) << label(c) << ", cut at " << cut;
    }
  }
}

}  // namespace
}  // namespace tfla::test
