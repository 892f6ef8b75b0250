// The delta rule makes the same bits from run to run, for any number of threads, and whatever the scratch or a
// neighbour contains.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "tests/delta/parts.h"

namespace tfla::test {
namespace {

using testkit::gather;

const DeltaSize shapes[] = {{1, 300, 1, 1, 8, 12, 16, {}},
                            {1, 200, 1, 3, 5, 7, 0, {}},
                            {3, 40, 2, 4, 8, 8, 16, {}},
                            {2, 1, 1, 2, 16, 3, 0, {}},
                            {1, 260, 1, 2, 4, 9, 16, {0, 3, 3, 4, 200, 250}},
                            {1, 150, 1, 1, 4, 131, 16, {}},
                            {1, 90, 1, 4, 20, 200, 0, {}}};

TEST(DeltaDeterminismSmall, ThreadsAndRunsDoNotMatter) {
  for (const DeltaSize& shape : shapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
      DeltaProblem problem(delta_case(shape, dtype));
      const Snapshot expected = run_both(problem);
      for (const int threads : {1, 2, 3, 8}) {
        problem.description.threads = threads;
        EXPECT_TRUE(same_bits(run_both(problem), expected)) << label(problem.description);
      }
    }
  }
}

TEST(DeltaDeterminismSmall, DirtyScratchAndAReusedPlanDoNotMatter) {
  for (const DeltaSize& shape : shapes) {
    DeltaProblem problem(delta_case(shape, DType::float32));
    const Snapshot expected = run_both(problem);
    const Execution execution{.threads = 3};
    const DeltaPlan forward_plan = delta_plan(problem.forward, execution);
    const DeltaPlan backward_plan = delta_plan(problem.backward, execution);
    const auto bytes = static_cast<std::int64_t>(std::max(forward_plan.scratch_bytes, backward_plan.scratch_bytes));
    const testkit::Buffer scratch(bytes);  // all NaN
    for (const int fill : {0xFF, 0x00, 0x7B}) {
      std::memset(scratch.data(), fill, static_cast<std::size_t>(bytes));
      problem.poison();
      delta_forward(problem.forward, forward_plan, std::span(scratch.data(), forward_plan.scratch_bytes));
      Snapshot both = snapshot(outputs(problem.forward));
      delta_backward(problem.backward, backward_plan, std::span(scratch.data(), backward_plan.scratch_bytes));
      both.merge(snapshot(outputs(problem.backward)));
      EXPECT_TRUE(same_bits(both, expected)) << label(problem.description) << ", scratch filled with " << fill;
      EXPECT_TRUE(scratch.margins_intact()) << label(problem.description);
    }
  }
}

// ---------------------------------------------------------------- poison stays at home

// Which value heads and query/key heads of the poisoned sequence may change.
struct Reach {
  std::int64_t first_head, heads, qk_head;
};

// Blanks what may change, so that the rest can be compared bit for bit.
Snapshot outside(const DeltaProblem& problem, Snapshot values, const std::vector<std::int64_t>& boundaries,
                 std::int64_t sequence, const Reach& reach) {
  const auto s = static_cast<std::size_t>(sequence);
  for (const auto& outs : {outputs(problem.forward), outputs(problem.backward)}) {
    for (const auto& [name, view] : outs) {
      const bool state = name == "C" || name == "dC0", shared = name == "dq" || name == "dk", per_head = view.rank == 1;
      const int head_axis = per_head ? 0 : state ? 1 : 2;
      std::int64_t inner = 1;
      for (int axis = head_axis + 1; axis < view.rank; ++axis) inner *= view.shape.at(static_cast<std::size_t>(axis));
      const std::int64_t heads = view.shape.at(static_cast<std::size_t>(head_axis));
      Values& flat = values.at(name);
      for (std::int64_t index = 0; index < std::ssize(flat); ++index) {
        const std::int64_t head = index / inner % heads, row = index / inner / heads;
        const bool in_sequence =
            per_head || (state ? row == sequence : row >= boundaries[s] && row < boundaries[s + 1]);
        const bool in_heads =
            shared ? head == reach.qk_head : head >= reach.first_head && head < reach.first_head + reach.heads;
        if (in_sequence && in_heads) flat[static_cast<std::size_t>(index)] = 0;
      }
    }
  }
  return values;
}

TEST(DeltaDeterminismSmall, PoisonStaysInItsSequenceAndHead) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::int64_t> boundaries{0, 21, 60, 60, 75};
  constexpr std::int64_t sequence = 1, head = 1, token = 33;
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const std::int64_t chunk_size : {16, 0}) {
      DeltaProblem problem(delta_case({1, 75, 2, 4, 5, 9, chunk_size, boundaries}, dtype));
      const DeltaForward& f = problem.forward;
      const DeltaBackward& b = problem.backward;
      const Snapshot clean = run_both(problem);
      const Reach group{0, 2, 0}, own{head, 1, 0};
      const struct {
        const char* name;
        TensorView hit;
        Reach reach;
      } rows[] = {{"q", slice(slice(f.q, 1, token, 1), 2, 0, 1), group},
                  {"k", slice(slice(f.k, 1, token, 1), 2, 0, 1), group},
                  {"v", slice(slice(f.v, 1, token, 1), 2, head, 1), own},
                  {"beta", slice(slice(f.beta, 1, token, 1), 2, head, 1), own},
                  {"g", slice(slice(f.g, 1, token, 1), 2, head, 1), own},
                  {"dh", slice(slice(b.dh, 1, token, 1), 2, head, 1), own},
                  {"initial_state", slice(slice(f.initial_state, 0, sequence, 1), 1, head, 1), own},
                  {"dlast_state", slice(slice(b.dlast_state, 0, sequence, 1), 1, head, 1), own}};
      for (const auto& row : rows) {
        const Values saved = gather(row.hit);
        for (const double poison : {nan, infinity, -infinity}) {
          overwrite(row.hit, Values(saved.size(), poison));
          const Snapshot hurt = run_both(problem);
          EXPECT_TRUE(same_bits(outside(problem, hurt, boundaries, sequence, row.reach),
                                outside(problem, clean, boundaries, sequence, row.reach)))
              << label(problem.description) << ": " << poison << " in " << row.name;
          EXPECT_FALSE(same_bits(hurt, clean)) << "the test would be empty if poison were ignored";
        }
        overwrite(row.hit, saved);
      }
      EXPECT_TRUE(same_bits(run_both(problem), clean));
    }
  }
}

TEST(DeltaDeterminismSmall, PoisonInARateStaysInItsHead) {
  DeltaProblem problem(delta_case({2, 40, 2, 4, 5, 9, 16, {}}, DType::float32));
  const Snapshot clean = run_both(problem);
  for (const TensorView& view : {problem.forward.A_log, problem.forward.dt_bias}) {
    const TensorView hit = slice(view, 0, 2, 1);
    const Values saved = gather(hit);
    overwrite(hit, {std::numeric_limits<double>::quiet_NaN()});
    Snapshot hurt = run_both(problem), kept = clean;
    EXPECT_TRUE(std::isnan(hurt.at("dA_log")[2]));
    for (auto& [name, values] : hurt) {
      if (name == "dq" || name == "dk") continue;  // of the group
      const std::int64_t inner = name == "h" || name == "dv" ? 9 : name == "C" || name == "dC0" ? 45 : 1;
      for (std::int64_t index = 0; index < std::ssize(values); ++index) {
        if (index / inner % 4 == 2)
          values[static_cast<std::size_t>(index)] = kept[name][static_cast<std::size_t>(index)];
      }
    }
    for (const char* shared : {"dq", "dk"}) {
      for (std::size_t index = 0; index < hurt[shared].size(); ++index) {
        if (index / 5 % 2 == 1) hurt[shared][index] = kept[shared][index];
      }
    }
    EXPECT_TRUE(same_bits(hurt, kept));
    overwrite(hit, saved);
  }
}

// Tokens behind the last sequence belong to nobody: what they hold reaches nothing.
TEST(DeltaDeterminismSmall, PaddingMayHoldAnything) {
  DeltaProblem problem(delta_case({1, 75, 2, 4, 5, 9, 16, {0, 21, 50}}, DType::float32));
  const Snapshot clean = run_both(problem);
  const DeltaForward& f = problem.forward;
  for (const TensorView& view : {f.q, f.k, f.v, f.beta, f.g, problem.backward.dh}) {
    const TensorView padding = slice(view, 1, 50, 25);
    overwrite(padding, Values(gather(padding).size(), std::numeric_limits<double>::quiet_NaN()));
  }
  EXPECT_TRUE(same_bits(run_both(problem), clean));
  for (const auto& [name, width] : {std::pair("h", 4 * 9), std::pair("dq", 2 * 5), std::pair("dk", 2 * 5),
                                    std::pair("dv", 4 * 9), std::pair("dbeta", 4), std::pair("dg", 4)}) {
    const Values& all = clean.at(name);
    EXPECT_EQ(Values(all.end() - 25 * width, all.end()), Values(static_cast<std::size_t>(25 * width), 0)) << name;
    EXPECT_NE(all[static_cast<std::size_t>(49 * width)], 0) << name;
  }
}

}  // namespace
}  // namespace tfla::test
