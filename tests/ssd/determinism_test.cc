// The state space dual makes the same bits from run to run, for any number of threads, and whatever the scratch or a
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

#include "tests/ssd/parts.h"

namespace tfla::test {
namespace {

using testkit::gather;

const SsdSize shapes[] = {{1, 300, 1, 1, 12, 8, 16, {}},
                          {1, 200, 1, 3, 7, 5, 0, {}},
                          {3, 40, 2, 4, 8, 8, 16, {}},
                          {2, 1, 1, 2, 3, 16, 0, {}},
                          {1, 260, 1, 2, 9, 4, 16, {0, 3, 3, 4, 200, 250}},
                          {1, 150, 1, 1, 131, 4, 16, {}},
                          {1, 90, 1, 4, 200, 20, 0, {}}};

TEST(SsdDeterminismSmall, ThreadsAndRunsDoNotMatter) {
  for (const SsdSize& shape : shapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
      SsdProblem problem(ssd_case(shape, dtype));
      const Snapshot expected = run_both(problem);
      for (const int threads : {1, 2, 3, 8}) {
        problem.description.threads = threads;
        EXPECT_TRUE(same_bits(run_both(problem), expected)) << label(problem.description);
      }
    }
  }
}

TEST(SsdDeterminismSmall, DirtyScratchAndAReusedPlanDoNotMatter) {
  for (const SsdSize& shape : shapes) {
    SsdProblem problem(ssd_case(shape, DType::float32));
    const Snapshot expected = run_both(problem);
    const Execution execution{.threads = 3};
    const SsdPlan forward_plan = ssd_plan(problem.forward, execution);
    const SsdPlan backward_plan = ssd_plan(problem.backward, execution);
    const auto bytes = static_cast<std::int64_t>(std::max(forward_plan.scratch_bytes, backward_plan.scratch_bytes));
    const testkit::Buffer scratch(bytes);  // all NaN
    for (const int fill : {0xFF, 0x00, 0x7B}) {
      std::memset(scratch.data(), fill, static_cast<std::size_t>(bytes));
      problem.poison_forward();
      problem.poison_backward();
      ssd_forward(problem.forward, forward_plan, std::span(scratch.data(), forward_plan.scratch_bytes));
      Snapshot both = snapshot(outputs(problem.forward));
      ssd_backward(problem.backward, backward_plan, std::span(scratch.data(), backward_plan.scratch_bytes));
      both.merge(snapshot(outputs(problem.backward)));
      EXPECT_TRUE(same_bits(both, expected)) << label(problem.description) << ", scratch filled with " << fill;
      EXPECT_TRUE(scratch.margins_intact()) << label(problem.description);
    }
  }
}

// ---------------------------------------------------------------- poison stays at home

// Which heads and group of the poisoned sequence may change.
struct Reach {
  std::int64_t first_head, heads, group;
};

// Blanks what may change, so that the rest can be compared bit for bit.
Snapshot outside(const SsdProblem& problem, Snapshot values, const std::vector<std::int64_t>& boundaries,
                 std::int64_t sequence, const Reach& reach) {
  const auto s = static_cast<std::size_t>(sequence);
  for (const auto& outs : {outputs(problem.forward), outputs(problem.backward)}) {
    for (const auto& [name, view] : outs) {
      const bool state = name == "S" || name == "dS0", shared = name == "dB" || name == "dC";
      const bool per_head = view.rank <= 2;
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
            shared ? head == reach.group : head >= reach.first_head && head < reach.first_head + reach.heads;
        if (in_sequence && in_heads) flat[static_cast<std::size_t>(index)] = 0;
      }
    }
  }
  return values;
}

TEST(SsdDeterminismSmall, PoisonStaysInItsSequenceAndHead) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::int64_t> boundaries{0, 21, 60, 60, 75};
  constexpr std::int64_t sequence = 1, head = 1, token = 33;
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const std::int64_t chunk_size : {16, 0}) {
      SsdProblem problem(ssd_case({1, 75, 2, 4, 9, 5, chunk_size, boundaries}, dtype));
      const SsdForward& f = problem.forward;
      const SsdBackward& b = problem.backward;
      const Snapshot clean = run_both(problem);
      const Reach group{0, 2, 0}, own{head, 1, 0};
      const struct {
        const char* name;
        TensorView hit;
        Reach reach;
      } rows[] = {{"B", slice(slice(f.B, 1, token, 1), 2, 0, 1), group},
                  {"C", slice(slice(f.C, 1, token, 1), 2, 0, 1), group},
                  {"x", slice(slice(f.x, 1, token, 1), 2, head, 1), own},
                  {"dt", slice(slice(f.dt, 1, token, 1), 2, head, 1), own},
                  {"z", slice(slice(f.z, 1, token, 1), 2, head, 1), own},
                  {"dy", slice(slice(b.dy, 1, token, 1), 2, head, 1), own},
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

// A of a head that is NaN: its dA is, and no other head's results are.
TEST(SsdDeterminismSmall, PoisonInANumberOfAHeadStaysInIt) {
  SsdProblem problem(ssd_case({2, 40, 4, 4, 9, 5, 16, {}}, DType::float32));
  const Snapshot clean = run_both(problem);
  for (const TensorView& view : {problem.forward.A, problem.forward.dt_bias, problem.forward.D}) {
    const TensorView hit = slice(view, 0, 2, 1);
    const Values saved = gather(hit);
    overwrite(hit, Values(saved.size(), std::numeric_limits<double>::quiet_NaN()));
    Snapshot hurt = run_both(problem);
    EXPECT_TRUE(std::isnan(hurt.at("y")[2 * 9]));
    for (auto& [name, values] : hurt) {
      const bool of_groups = name == "dB" || name == "dC", one = name == "dA" || name == "ddt" || name == "ddt_bias";
      const bool state = name == "S" || name == "dS0";
      const std::int64_t inner = of_groups ? 5 : one ? 1 : state ? 45 : 9;
      for (std::int64_t index = 0; index < std::ssize(values); ++index) {
        if (index / inner % 4 == 2)
          values[static_cast<std::size_t>(index)] = clean.at(name)[static_cast<std::size_t>(index)];
      }
    }
    EXPECT_TRUE(same_bits(hurt, clean));
    overwrite(hit, saved);
  }
}

// Tokens behind the last sequence belong to nobody: what they hold reaches nothing.
TEST(SsdDeterminismSmall, PaddingMayHoldAnything) {
  SsdProblem problem(ssd_case({1, 75, 2, 4, 9, 5, 16, {0, 21, 50}}, DType::float32));
  const Snapshot clean = run_both(problem);
  const SsdForward& f = problem.forward;
  for (const TensorView& view : {f.x, f.dt, f.B, f.C, f.z, problem.backward.dy}) {
    const TensorView padding = slice(view, 1, 50, 25);
    overwrite(padding, Values(gather(padding).size(), std::numeric_limits<double>::quiet_NaN()));
  }
  EXPECT_TRUE(same_bits(run_both(problem), clean));
  for (const char* name : {"y", "ungated", "dx", "dz", "ddt", "dB", "dC"}) {
    const Values& all = clean.at(name);
    EXPECT_TRUE(std::all_of(all.end() - std::ssize(all) / 3, all.end(), [](double x) { return x == 0; })) << name;
  }
}

}  // namespace
}  // namespace tfla::test
