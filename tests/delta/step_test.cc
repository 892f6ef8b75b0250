// The step of the delta rule: against forward, with slots, and next to rows that hold no numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tests/delta/parts.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Tensor;

struct StepCase {
  std::int64_t batch, tokens, qk_heads, heads, dqk, dhv;
};
const StepCase step_cases[] = {{3, 1, 2, 4, 5, 7}, {4, 3, 1, 2, 16, 33}, {2, 1, 1, 1, 64, 200}, {5, 9, 1, 3, 1, 1}};

DeltaStep step_args(const DeltaProblem& problem, const MutableTensorView& state) {
  const DeltaForward& f = problem.forward;
  return {.q = f.q,
          .k = f.k,
          .v = f.v,
          .beta = f.beta,
          .g = f.g,
          .A_log = f.A_log,
          .dt_bias = f.dt_bias,
          .h = f.h,
          .state = state,
          .options = f.options};
}

DeltaCase step_case(const StepCase& s, DType dtype) {
  return delta_case({s.batch, s.tokens, s.qk_heads, s.heads, s.dqk, s.dhv, 0, {}}, dtype);
}

TEST(DeltaStepSmall, EqualsForward) {
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    for (const StepCase& s : step_cases) {
      DeltaCase c = step_case(s, dtype);
      c.in_place = true;
      DeltaProblem problem(c);
      const DeltaJudge judge(problem);
      const Snapshot expected = run_forward(problem);
      problem.poison();
      const DeltaStep args = step_args(problem, problem.forward.last_state);
      delta_step(args);
      EXPECT_TRUE(judge.agree(snapshot(outputs(args)), expected));
    }
  }
}

TEST(DeltaStepSmall, ThreadsScratchAndRunsDoNotMatter) {
  for (const StepCase& s : step_cases) {
    DeltaCase c = step_case(s, DType::float32);
    c.in_place = true;
    DeltaProblem problem(c);
    const DeltaStep args = step_args(problem, problem.forward.last_state);
    delta_step(args);
    const Snapshot expected = snapshot(outputs(args));
    for (const int threads : {1, 2, 3, 8}) {
      problem.poison();
      delta_step(args, {.threads = threads});
      EXPECT_TRUE(same_bits(snapshot(outputs(args)), expected)) << label(c) << ", threads " << threads;
    }
    const DeltaPlan chosen = delta_plan(args);
    const testkit::Buffer scratch(static_cast<std::int64_t>(chosen.scratch_bytes));  // all NaN
    problem.poison();
    delta_step(args, chosen, std::span(scratch.data(), chosen.scratch_bytes));
    EXPECT_TRUE(same_bits(snapshot(outputs(args)), expected)) << label(c);
    EXPECT_TRUE(scratch.margins_intact());
  }
}

// Slots in any order, one of them padding, in a pool that has more states and is itself a slice of a larger one.
TEST(DeltaStepSmall, SlotsChooseStatesAndPaddingHasNone) {
  for (const StepCase& s : step_cases) {
    DeltaProblem problem(step_case(s, DType::float32));
    const std::int64_t pool = s.batch + 3, states = pool + 2;
    std::vector<std::int64_t> wide(static_cast<std::size_t>(s.batch));
    for (std::int64_t b = 0; b < s.batch; ++b) wide[static_cast<std::size_t>(b)] = pool - 2 - b;
    wide[1] = -1;
    const std::vector<std::int32_t> narrow(wide.begin(), wide.end());
    // What each row comes to by itself.
    std::vector<Values> rows_h, rows_C;
    for (std::int64_t b = 0; b < s.batch; ++b) {
      const Tensor own(DType::float32, {1, s.heads, s.dqk, s.dhv});
      testkit::scatter(own.view, gather(slice(problem.forward.initial_state, 0, b, 1)));
      DeltaStep one = part(step_args(problem, own.view), b, 0, s.tokens);
      delta_step(one);
      rows_h.push_back(gather(one.h));
      rows_C.push_back(gather(one.state));
    }
    for (const TensorView& slots :
         {TensorView(wide.data(), DType::int64, {s.batch}), TensorView(narrow.data(), DType::int32, {s.batch})}) {
      problem.poison();
      const Tensor all(DType::float32, {states, s.heads, s.dqk, s.dhv});  // NaN where no row looks
      const MutableTensorView used = slice(all.view, 0, 1, pool);
      for (std::int64_t b = 0; b < s.batch; ++b) {
        const std::int64_t slot = wide[static_cast<std::size_t>(b)];
        if (slot >= 0) testkit::scatter(slice(used, 0, slot, 1), gather(slice(problem.forward.initial_state, 0, b, 1)));
      }
      Values kept = gather(all.view);
      DeltaStep args = step_args(problem, used);
      args.slots = slots;
      delta_step(args, {.threads = 3});
      const auto entry = static_cast<std::ptrdiff_t>(s.heads * s.dqk * s.dhv);
      for (std::int64_t b = 0; b < s.batch; ++b) {
        const std::int64_t slot = wide[static_cast<std::size_t>(b)];
        const Values h = gather(slice(args.h, 0, b, 1));
        const Values& own = rows_h[static_cast<std::size_t>(b)];
        EXPECT_TRUE(same_bits(h, slot < 0 ? Values(own.size(), 0) : own)) << "row " << b;
        const Values& C = rows_C[static_cast<std::size_t>(b)];
        if (slot >= 0) std::copy(C.begin(), C.end(), kept.begin() + (slot + 1) * entry);
      }
      EXPECT_TRUE(same_bits(gather(all.view), kept));
      EXPECT_TRUE(all.buffer->margins_intact());
      EXPECT_TRUE(problem.surroundings_intact());
    }
  }
}

TEST(DeltaStepSmall, PoisonStaysInItsRowAndHead) {
  DeltaCase c = step_case(step_cases[0], DType::float32);
  c.in_place = true;
  DeltaProblem problem(c);
  const DeltaForward& f = problem.forward;
  const DeltaStep args = step_args(problem, f.last_state);
  delta_step(args);
  const Snapshot clean = snapshot(outputs(args));
  constexpr std::int64_t row = 1, head = 2;  // the query/key head of value head 2 is 1, shared with head 3
  const struct {
    const char* name;
    TensorView view;
    std::int64_t at_head, heads;
  } rows[] = {{"q", f.q, 1, 2}, {"k", f.k, 1, 2}, {"v", f.v, head, 1}, {"beta", f.beta, head, 1}, {"g", f.g, head, 1}};
  for (const auto& hit : rows) {
    const TensorView poisoned = slice(slice(hit.view, 0, row, 1), 2, hit.at_head, 1);
    const Values saved = gather(poisoned);
    overwrite(poisoned, Values(saved.size(), std::numeric_limits<double>::quiet_NaN()));
    problem.poison();
    delta_step(args);
    Snapshot hurt = snapshot(outputs(args));
    EXPECT_FALSE(same_bits(hurt, clean)) << hit.name;
    for (auto& [name, values] : hurt) {
      const std::int64_t inner = name == "h" ? 7 : 35;  // one token: h has the axes row, head, dhv
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
