// The state space dual on a GPU, beyond the tables: states in 16 bits, slots, padding, and the same bits from run to
// run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/operators/ssd_cuda.h"
#include "tests/ssd/parts.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Tensor;

SsdCase on_cuda(SsdCase c, bool portable = true) {
  c.device = Device::cuda;
  c.portable = portable;
  return c;
}

class CudaSsd : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  }
};

// One token, judged from the state as it is stored; the new state is rounded once.
TEST_F(CudaSsd, StatesOfAStepIn16BitsAreRoundedOnce) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const DType stored : {DType::float32, DType::bfloat16, DType::float16}) {
      for (const SsdSize& s : {SsdSize{3, 1, 2, 4, 64, 128, 0, {}}, SsdSize{2, 1, 2, 4, 16, 24, 0, {}},
                               SsdSize{1, 1, 1, 1, 3, 5, 0, {}}}) {
        SsdProblem problem(on_cuda(ssd_case(s, dtype)));
        const Tensor state(stored, {s.batch, s.heads, s.P, s.S});
        testkit::scatter(state.view, gather(problem.forward.initial_state));
        overwrite(problem.forward.initial_state, gather(state.view));
        const testkit::SsdJudge judge(problem);
        const SsdStep args = problem.step(state.view);
        ssd_step(args, execution_of(problem.description));
        EXPECT_LE(testkit::distance(gather(args.y), judge.expected("y")), judge.allowed("y"));
        const double unit = stored == DType::float32 ? 1e-5 : testkit::unit_of_rounding(stored);
        EXPECT_TRUE(close(gather(args.state), judge.expected("S"), unit)) << label(problem.description);
        EXPECT_TRUE(state.buffer->margins_intact());
        EXPECT_TRUE(problem.surroundings_intact());
      }
    }
  }
}

// Slots in any order. -1 and slots that do not exist are padding: rows of 0, and states as they were.
TEST_F(CudaSsd, SlotsOfAStepChooseStates) {
  const SsdSize s{4, 3, 1, 2, 33, 16, 0, {}};
  const std::int64_t pool = 7, entry = s.heads * s.P * s.S;
  const std::int64_t chosen[] = {5, -1, 0, pool};
  for (const DType stored : {DType::float32, DType::bfloat16}) {
    for (const DType index : {DType::int32, DType::int64}) {
      SsdProblem problem(on_cuda(ssd_case(s, DType::float32)));
      const Execution execution = execution_of(problem.description);
      const Tensor slots(index, {s.batch}), all(stored, {pool, s.heads, s.P, s.S}),
          own(stored, {s.batch, s.heads, s.P, s.S});
      const Values initial = gather(problem.forward.initial_state);
      testkit::scatter(own.view, initial);
      Values expected_states = gather(all.view);
      for (std::int64_t b = 0; b < s.batch; ++b) {
        if (index == DType::int32) {
          static_cast<std::int32_t*>(slots.view.data)[b] = static_cast<std::int32_t>(chosen[b]);
        } else {
          static_cast<std::int64_t*>(slots.view.data)[b] = chosen[b];
        }
        if (chosen[b] >= 0 && chosen[b] < pool)
          testkit::scatter(slice(all.view, 0, chosen[b], 1), gather(slice(own.view, 0, b, 1)));
      }
      ssd_step(problem.step(own.view), execution);  // every row with a state of its own
      const Values y = gather(problem.forward.y), S = gather(own.view);
      problem.poison_forward();
      SsdStep args = problem.step(all.view);
      args.slots = slots.view;
      ssd_step(args, execution);
      const Values found = gather(args.y);
      Values expected = y;
      const std::ptrdiff_t row = std::ssize(y) / s.batch;
      for (std::int64_t b = 0; b < s.batch; ++b) {
        if (chosen[b] >= 0 && chosen[b] < pool) {
          std::copy_n(S.begin() + b * entry, entry, expected_states.begin() + chosen[b] * entry);
        } else {
          std::fill_n(expected.begin() + b * row, row, 0.0);
        }
      }
      EXPECT_TRUE(same_bits(found, expected));
      EXPECT_TRUE(same_bits(gather(all.view), expected_states));
      EXPECT_TRUE(all.buffer->margins_intact());
      EXPECT_TRUE(problem.surroundings_intact());
    }
  }
}

// Tokens behind the last sequence belong to nobody: what they hold reaches nothing.
TEST_F(CudaSsd, PaddingMayHoldAnything) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const auto& [P, portable] : {std::pair(9, true), {16, true}, {16, false}, {72, false}}) {
      SsdProblem problem(on_cuda(ssd_case({1, 75, 2, 4, P, 8, 16, {0, 21, 50}}, dtype), portable));
      const Snapshot clean = run_both(problem);
      const SsdForward& f = problem.forward;
      for (const TensorView& view : {f.x, f.dt, f.B, f.C, f.z, problem.backward.dy}) {
        const TensorView padding = slice(view, 1, 50, 25);
        overwrite(padding, Values(gather(padding).size(), std::numeric_limits<double>::quiet_NaN()));
      }
      EXPECT_TRUE(same_bits(run_both(problem), clean));
      const TensorView D = f.D;
      overwrite(D, Values(gather(D).size(), std::numeric_limits<double>::infinity()));
      const Snapshot infinite = run_both(problem);
      for (const Snapshot& results : {clean, infinite}) {
        for (const char* name : {"y", "ungated", "dx", "dz", "ddt", "dB", "dC"}) {
          const Values& all = results.at(name);
          EXPECT_TRUE(std::all_of(all.end() - std::ssize(all) / 3, all.end(), [](double x) { return x == 0; })) << name;
        }
      }
    }
  }
}

TEST_F(CudaSsd, RunsAndDirtyScratchDoNotMatter) {
  const SsdSize sizes[] = {{2, 200, 1, 3, 7, 5, 0, {}}, {1, 260, 1, 2, 64, 16, 0, {0, 3, 3, 4, 200, 250}}};
  for (const SsdSize& size : sizes) {
    for (const auto& [dtype, portable] :
         {std::pair(DType::float32, true), {DType::bfloat16, true}, {DType::bfloat16, false}}) {
      SsdProblem problem(on_cuda(ssd_case(size, dtype), portable));
      const Snapshot expected = run_both(problem);
      const Execution execution = execution_of(problem.description);
      const SsdPlan forward_plan = ssd_plan(problem.forward, execution);
      const SsdPlan backward_plan = ssd_plan(problem.backward, execution);
      const auto bytes = static_cast<std::int64_t>(std::max(forward_plan.scratch_bytes, backward_plan.scratch_bytes));
      const testkit::Buffer scratch(bytes);
      for (const int fill : {0xFF, 0x7B}) {
        std::memset(scratch.data(), fill, static_cast<std::size_t>(bytes));
        problem.poison_forward();
        problem.poison_backward();
        ssd_forward(problem.forward, forward_plan, std::span(scratch.data(), forward_plan.scratch_bytes));
        Snapshot both = snapshot(outputs(problem.forward));
        ssd_backward(problem.backward, backward_plan, std::span(scratch.data(), backward_plan.scratch_bytes));
        both.merge(snapshot(outputs(problem.backward)));
        EXPECT_TRUE(same_bits(both, expected)) << label(problem.description) << ", scratch filled with " << fill;
        EXPECT_TRUE(scratch.margins_intact());
      }
    }
  }
}

// y has the same bits whether `ungated` is wanted besides or not, in the scan and in a kernel behind it where that
// reads what the scan rounded.
TEST_F(CudaSsd, UngatedIsOptional) {
  for (const bool portable : {true, false}) {
    for (const std::int64_t P : {64, 128}) {
      SsdProblem problem(on_cuda(ssd_case({2, 150, 1, 2, P, 64, 0, {}}, DType::bfloat16), portable));
      const Execution execution = execution_of(problem.description);
      const Values y = run_forward(problem).at("y");
      SsdForward alone = problem.forward;
      alone.ungated = {};
      problem.poison_forward();
      ssd_forward(alone, execution);
      EXPECT_TRUE(same_bits(gather(alone.y), y)) << label(problem.description);
      EXPECT_TRUE(problem.surroundings_intact());
    }
  }
}

// Rows of z, y or ungated that tensor maps cannot describe: the epilogue is a launch of its own.
TEST_F(CudaSsd, RowsOfAnEpilogueMayLieAnywhere) {
  const SsdSize s{2, 150, 1, 2, 64, 64, 0, {}};
  SsdProblem problem(on_cuda(ssd_case(s, DType::bfloat16), false));
  const Execution execution = execution_of(problem.description);
  const SsdJudge judge(problem);
  const SsdPlan aligned = ssd_plan(problem.forward, execution);
  EXPECT_EQ(has_fused_epilogue(aligned), aligned.scan.gpu.capability == 90) << describe(aligned);
  const Tensor rows(DType::bfloat16, {s.batch, s.tokens, s.heads, s.P + 1});
  const MutableTensorView crooked = slice(rows.view, 3, 1, s.P);
  std::vector<SsdForward> calls(3, problem.forward);
  calls[0].z = crooked;
  calls[1].y = crooked;
  calls[2].ungated = crooked;
  for (const SsdForward& args : calls) {
    problem.poison_forward();
    overwrite(crooked, gather(problem.forward.z));
    const SsdPlan plan = ssd_plan(args, execution);
    EXPECT_FALSE(has_fused_epilogue(plan)) << describe(plan);
    const testkit::Buffer scratch(static_cast<std::int64_t>(std::max(plan.scratch_bytes, aligned.scratch_bytes)));
    const Snapshot before = snapshot(outputs(args));
    EXPECT_THROW(ssd_forward(args, aligned, std::span(scratch.data(), aligned.scratch_bytes)), InvalidArgument);
    EXPECT_TRUE(same_bits(snapshot(outputs(args)), before));
    ssd_forward(args, plan, std::span(scratch.data(), plan.scratch_bytes));
    EXPECT_TRUE(judge.within_bounds(snapshot(outputs(args))));
  }
}

}  // namespace
}  // namespace tfla::test
