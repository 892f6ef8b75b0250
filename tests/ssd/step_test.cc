// The step of the state space dual: against forward, with states in 16 bits, with slots, and next to rows that hold no
// numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tests/ssd/parts.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Tensor;

struct StepCase {
  std::int64_t batch, tokens, groups, heads, P, S;
};
const StepCase step_cases[] = {{3, 1, 2, 4, 5, 7}, {4, 3, 1, 2, 33, 16}, {2, 1, 1, 1, 200, 64}, {5, 9, 1, 3, 1, 1}};

SsdCase step_case(const StepCase& s, DType dtype) {
  return ssd_case({s.batch, s.tokens, s.groups, s.heads, s.P, s.S, 0, {}}, dtype);
}

TEST(SsdStepSmall, EqualsForward) {
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    for (const StepCase& s : step_cases) {
      SsdCase c = step_case(s, dtype);
      c.in_place = true;
      SsdProblem problem(c);
      const SsdJudge judge(problem);
      Snapshot expected = run_forward(problem);
      expected.erase("ungated");
      problem.poison_forward();
      const SsdStep args = problem.step(problem.forward.last_state);
      ssd_step(args);
      EXPECT_TRUE(judge.agree(snapshot(outputs(args)), expected));
    }
  }
}

TEST(SsdStepSmall, ThreadsScratchAndRunsDoNotMatter) {
  for (const StepCase& s : step_cases) {
    SsdCase c = step_case(s, DType::float32);
    c.in_place = true;
    SsdProblem problem(c);
    const SsdStep args = problem.step(problem.forward.last_state);
    ssd_step(args);
    const Snapshot expected = snapshot(outputs(args));
    for (const int threads : {1, 2, 3, 8}) {
      problem.poison_forward();
      ssd_step(args, {.threads = threads});
      EXPECT_TRUE(same_bits(snapshot(outputs(args)), expected)) << label(c) << ", threads " << threads;
    }
    const SsdPlan chosen = ssd_plan(args, {.threads = 3});
    const testkit::Buffer scratch(static_cast<std::int64_t>(chosen.scratch_bytes));  // all NaN
    problem.poison_forward();
    ssd_step(args, chosen, std::span(scratch.data(), chosen.scratch_bytes));
    EXPECT_TRUE(same_bits(snapshot(outputs(args)), expected)) << label(c);
    EXPECT_TRUE(scratch.margins_intact());
  }
}

// ---------------------------------------------------------------- states in 16 bits

// One token, judged from the state as it is stored; the new state is rounded once.
TEST(SsdStepSmall, StatesIn16BitsAreRoundedOnce) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const DType stored : {DType::bfloat16, DType::float16}) {
      for (const StepCase& s : {StepCase{3, 1, 2, 4, 16, 24}, StepCase{1, 1, 1, 1, 3, 5}}) {
        SsdProblem problem(step_case(s, dtype));
        const Tensor state(stored, {s.batch, s.heads, s.P, s.S});
        testkit::scatter(state.view, gather(problem.forward.initial_state));
        overwrite(problem.forward.initial_state, gather(state.view));
        const testkit::SsdJudge judge(problem);
        const SsdStep args = problem.step(state.view);
        ssd_step(args, {.threads = 3});
        const Values y = gather(args.y), S = gather(args.state), expected = judge.expected("S");
        EXPECT_LE(testkit::distance(y, judge.expected("y")), judge.allowed("y"));
        EXPECT_TRUE(close(S, expected, testkit::unit_of_rounding(stored)));
        // Nearly all are the very neighbours that the reference rounds to.
        const Tensor rounded(stored, {s.batch, s.heads, s.P, s.S});
        testkit::scatter(rounded.view, expected);
        const Values neighbours = gather(rounded.view);
        std::size_t other = 0;
        for (std::size_t at = 0; at < S.size(); ++at) other += S[at] == neighbours[at] ? 0U : 1U;
        EXPECT_LE(other, S.size() / 50) << "of " << S.size();
        EXPECT_TRUE(state.buffer->margins_intact());
      }
    }
  }
}

TEST(SsdStepSmall, TokensOfOneCallEqualCallsOfOneTokenInEveryStateDType) {
  const StepCase s{2, 7, 1, 2, 19, 12};
  for (const DType stored : {DType::float32, DType::bfloat16, DType::float16}) {
    SsdProblem problem(step_case(s, DType::float32));
    const Tensor at_once(stored, {s.batch, s.heads, s.P, s.S}), one_by_one(stored, {s.batch, s.heads, s.P, s.S});
    for (const Tensor* state : {&at_once, &one_by_one})
      testkit::scatter(state->view, gather(problem.forward.initial_state));
    ssd_step(problem.step(at_once.view));
    const Values y = gather(problem.forward.y);
    problem.poison_forward();
    SsdStep one = problem.step(one_by_one.view);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      SsdStep token = one;
      for (TensorView* view : {&token.x, &token.dt, &token.B, &token.C, &token.z}) *view = slice(*view, 1, t, 1);
      token.y = slice(token.y, 1, t, 1);
      ssd_step(token, {.threads = 3});
    }
    EXPECT_TRUE(same_bits(gather(problem.forward.y), y));
    EXPECT_TRUE(same_bits(gather(one_by_one.view), gather(at_once.view)));
  }
}

// ---------------------------------------------------------------- slots

// Slots in any order, one of them padding, in a pool that has more states and is itself a slice of a larger one.
TEST(SsdStepSmall, SlotsChooseStatesAndPaddingHasNone) {
  for (const DType stored : {DType::float32, DType::bfloat16}) {
    for (const StepCase& s : step_cases) {
      SsdProblem problem(step_case(s, DType::float32));
      const TensorView initial = problem.forward.initial_state;
      const std::int64_t pool = s.batch + 3, states = pool + 2;
      std::vector<std::int64_t> wide(static_cast<std::size_t>(s.batch));
      for (std::int64_t b = 0; b < s.batch; ++b) wide[static_cast<std::size_t>(b)] = pool - 2 - b;
      wide[1] = -1;
      const std::vector<std::int32_t> narrow(wide.begin(), wide.end());
      std::vector<Values> rows_y, rows_S;  // what each row comes to by itself
      for (std::int64_t b = 0; b < s.batch; ++b) {
        const Tensor own(stored, {1, s.heads, s.P, s.S});
        testkit::scatter(own.view, gather(slice(initial, 0, b, 1)));
        const SsdStep one = part(problem.step(own.view), b, 0, s.tokens);
        ssd_step(one);
        rows_y.push_back(gather(one.y));
        rows_S.push_back(gather(one.state));
      }
      for (const TensorView& slots :
           {TensorView(wide.data(), DType::int64, {s.batch}), TensorView(narrow.data(), DType::int32, {s.batch})}) {
        problem.poison_forward();
        const Tensor all(stored, {states, s.heads, s.P, s.S});  // NaN where no row looks
        const MutableTensorView used = slice(all.view, 0, 1, pool);
        for (std::int64_t b = 0; b < s.batch; ++b) {
          const std::int64_t slot = wide[static_cast<std::size_t>(b)];
          if (slot >= 0) testkit::scatter(slice(used, 0, slot, 1), gather(slice(initial, 0, b, 1)));
        }
        Values kept = gather(all.view);
        SsdStep args = problem.step(used);
        args.slots = slots;
        ssd_step(args, {.threads = 3});
        const auto entry = static_cast<std::ptrdiff_t>(s.heads * s.P * s.S);
        for (std::int64_t b = 0; b < s.batch; ++b) {
          const std::int64_t slot = wide[static_cast<std::size_t>(b)];
          const Values& own = rows_y[static_cast<std::size_t>(b)];
          EXPECT_TRUE(same_bits(gather(slice(args.y, 0, b, 1)), slot < 0 ? Values(own.size(), 0) : own)) << b;
          const Values& S = rows_S[static_cast<std::size_t>(b)];
          if (slot >= 0) std::copy(S.begin(), S.end(), kept.begin() + (slot + 1) * entry);
        }
        EXPECT_TRUE(same_bits(gather(all.view), kept));
        EXPECT_TRUE(all.buffer->margins_intact());
        EXPECT_TRUE(problem.surroundings_intact());
      }
    }
  }
}

TEST(SsdStepSmall, PoisonStaysInItsRowAndHead) {
  SsdCase c = step_case(step_cases[0], DType::float32);
  c.in_place = true;
  SsdProblem problem(c);
  const SsdForward& f = problem.forward;
  const SsdStep args = problem.step(f.last_state);
  ssd_step(args);
  const Snapshot clean = snapshot(outputs(args));
  constexpr std::int64_t row = 1, head = 2;  // of group 1, which head 3 reads too
  const struct {
    const char* name;
    TensorView view;
    std::int64_t at_head, heads;
  } rows[] = {{"B", f.B, 1, 2}, {"C", f.C, 1, 2}, {"x", f.x, head, 1}, {"dt", f.dt, head, 1}, {"z", f.z, head, 1}};
  for (const auto& hit : rows) {
    const TensorView poisoned = slice(slice(hit.view, 0, row, 1), 2, hit.at_head, 1);
    const Values saved = gather(poisoned);
    overwrite(poisoned, Values(saved.size(), std::numeric_limits<double>::quiet_NaN()));
    problem.poison_forward();
    ssd_step(args);
    Snapshot hurt = snapshot(outputs(args));
    EXPECT_FALSE(same_bits(hurt, clean)) << hit.name;
    for (auto& [name, values] : hurt) {
      const std::int64_t inner = name == "y" ? 5 : 35;  // one token: y has the axes row, head, P
      for (std::int64_t index = 0; index < std::ssize(values); ++index) {
        const std::int64_t at = index / inner % 4;
        if (index / inner / 4 == row && at >= head && at < head + hit.heads)
          values[static_cast<std::size_t>(index)] = clean.at(name)[static_cast<std::size_t>(index)];
      }
    }
    EXPECT_TRUE(same_bits(hurt, clean)) << hit.name;
    overwrite(poisoned, saved);
  }
}

}  // namespace
}  // namespace tfla::test
