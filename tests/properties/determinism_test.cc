// The same bits from run to run, for any number of threads, and whatever the scratch or a neighbour contains.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "testkit/tensor.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::Regime;
using testkit::Case;
using testkit::gather;
using testkit::Problem;

struct Shape {
  std::int64_t batch, tokens, qk_heads, heads, dqk, dhv, chunk_size;
  std::vector<std::int64_t> cu_seqlens;
};

Case make_case(const Shape& s, DType dtype, Formulation formulation) {
  Case c;
  c.regime = Regime::trained_like;
  c.shape = {.batch = s.batch,
             .tokens = s.tokens,
             .qk_heads = s.qk_heads,
             .heads = s.heads,
             .dqk = s.dqk,
             .dhv = s.dhv,
             .dtype = dtype};
  c.cu_seqlens = s.cu_seqlens;
  c.options.chunk_size = s.chunk_size;
  c.options.formulation = formulation;
  c.options.exact_normalizer_grad = true;
  c.initial_state = c.last_state_grad = true;
  return c;
}

Snapshot run(Problem& problem, Formulation formulation, int threads) {
  const Execution execution{.threads = threads};
  return formulation == Formulation::recurrent ? run_forward(problem, execution) : run_both(problem, execution);
}

// Fewer heads than threads, more heads than threads, one token, uneven packing, a group that shares its keys; states
// of more columns than one thread takes.
const Shape small_shapes[] = {{1, 300, 1, 1, 8, 12, 16, {}},
                              {1, 200, 1, 3, 5, 7, 0, {}},
                              {3, 40, 2, 4, 8, 8, 16, {}},
                              {2, 1, 1, 2, 16, 3, 0, {}},
                              {1, 260, 1, 2, 4, 9, 16, {0, 3, 3, 4, 200, 260}},
                              {1, 300, 1, 1, 4, 131, 16, {}}};
const Shape large_shapes[] = {{1, 5000, 1, 1, 32, 48, 0, {}},
                              {1, 3000, 2, 2, 64, 64, 64, {}},
                              {1, 4000, 1, 3, 33, 17, 0, {0, 1, 2500, 2500, 4000}},
                              {2, 1025, 2, 4, 128, 256, 0, {}}};

void expect_same_for_all_threads(const Shape& shape) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
    for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
      const Case c = make_case(shape, dtype, formulation);
      Problem problem(c);
      const Snapshot expected = run(problem, formulation, 1);
      for (const int threads : {1, 2, 3, 5, 8}) {
        EXPECT_TRUE(same_bits(run(problem, formulation, threads), expected)) << label(c) << ", threads " << threads;
      }
    }
  }
}

TEST(DeterminismSmall, ThreadsAndRunsDoNotMatter) {
  for (const Shape& shape : small_shapes) expect_same_for_all_threads(shape);
}

TEST(Determinism, ThreadsAndRunsDoNotMatter) {
  for (const Shape& shape : large_shapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const Case c = make_case(shape, dtype, Formulation::chunkwise);
      Problem problem(c);
      const Snapshot expected = run(problem, Formulation::chunkwise, 1);
      for (const int threads : {1, 2, 3, 5, 8}) {
        EXPECT_TRUE(same_bits(run(problem, Formulation::chunkwise, threads), expected))
            << label(c) << ", threads " << threads;
      }
    }
  }
}

TEST(DeterminismSmall, DirtyScratchAndAReusedPlanDoNotMatter) {
  for (const Shape& shape : small_shapes) {
    for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel}) {
      const Case c = make_case(shape, DType::float32, formulation);
      Problem problem(c);
      const Snapshot expected = run_both(problem);
      const Plan forward_plan = plan(problem.forward()), backward_plan = plan(problem.backward());
      const auto bytes = static_cast<std::int64_t>(std::max(forward_plan.scratch_bytes, backward_plan.scratch_bytes));
      testkit::Buffer scratch(bytes);  // all NaN
      for (const int fill : {0xFF, 0x00, 0x7B}) {
        std::memset(scratch.data(), fill, static_cast<std::size_t>(bytes));
        problem.poison();
        forward(problem.forward(), forward_plan, std::span(scratch.data(), forward_plan.scratch_bytes));
        Snapshot both = snapshot(problem.forward());
        backward(problem.backward(), backward_plan, std::span(scratch.data(), backward_plan.scratch_bytes));
        both.merge(snapshot(problem.backward()));
        EXPECT_TRUE(same_bits(both, expected)) << label(c) << ", scratch filled with " << fill;
        EXPECT_TRUE(scratch.margins_intact()) << label(c);
      }
    }
  }
}

// One of the two gradients of the last state alone: the other is zero, whatever scratch held.
TEST(DeterminismSmall, AMissingGradientOfTheLastStateIsZero) {
  for (const Shape& shape : small_shapes) {
    for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel}) {
      for (const bool without_n : {false, true}) {
        const Case c = make_case(shape, DType::float32, formulation);
        Problem problem(c);
        MlstmBackward& args = problem.backward();
        TensorView& missing = without_n ? args.dlast_state.n : args.dlast_state.C;
        overwrite(missing, Values(gather(missing).size(), 0));
        const Execution execution{.threads = 3};
        const Snapshot expected = run_backward(problem, execution);
        missing = {};
        const Plan chosen = plan(args, execution);
        const testkit::Buffer scratch(static_cast<std::int64_t>(chosen.scratch_bytes));  // all NaN
        problem.poison();
        backward(args, chosen, std::span(scratch.data(), chosen.scratch_bytes));
        EXPECT_TRUE(same_bits(snapshot(args), expected)) << label(c) << ", without " << (without_n ? "n" : "C");
      }
    }
  }
}

// ---------------------------------------------------------------- poison stays at home

// Which value heads and query/key heads of the poisoned sequence may change.
struct Reach {
  std::int64_t first_head, heads, qk_head;
};

// Blanks what may change, so that the rest can be compared bit for bit.
Snapshot outside(Problem& problem, Snapshot values, const std::vector<std::int64_t>& boundaries, std::int64_t sequence,
                 const Reach& reach) {
  const auto s = static_cast<std::size_t>(sequence);
  for (const auto& outs : {outputs(problem.forward()), outputs(problem.backward())}) {
    for (const auto& [name, view] : outs) {
      const bool state = name == "C" || name == "n" || name == "m" || name == "dC0" || name == "dn0";
      const bool shared = name == "dq" || name == "dk";
      const int head_axis = state ? 1 : 2;
      std::int64_t inner = 1;
      for (int axis = head_axis + 1; axis < view.rank; ++axis) inner *= view.shape.at(static_cast<std::size_t>(axis));
      const std::int64_t heads = view.shape.at(static_cast<std::size_t>(head_axis));
      Values& flat = values.at(name);
      for (std::int64_t index = 0; index < std::ssize(flat); ++index) {
        const std::int64_t head = index / inner % heads, row = index / inner / heads;
        const bool in_sequence = state ? row == sequence : row >= boundaries[s] && row < boundaries[s + 1];
        const bool in_heads =
            shared ? head == reach.qk_head : head >= reach.first_head && head < reach.first_head + reach.heads;
        if (in_sequence && in_heads) flat[static_cast<std::size_t>(index)] = 0;
      }
    }
  }
  return values;
}

TEST(DeterminismSmall, PoisonStaysInItsSequenceAndHead) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::int64_t> boundaries{0, 21, 60, 60, 75};
  constexpr std::int64_t sequence = 1, head = 1, token = 33;
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel}) {
      for (const std::int64_t chunk_size : {16, 0}) {
        const Case c = make_case({1, 75, 2, 4, 5, 9, chunk_size, boundaries}, dtype, formulation);
        Problem problem(c);
        MlstmForward& f = problem.forward();
        MlstmBackward& b = problem.backward();
        const Snapshot clean = run_both(problem);
        const Reach group{0, 2, 0}, own{head, 1, 0};
        const struct {
          const char* name;
          TensorView view;
          Reach reach;
          bool state;
        } rows[] = {{"q", f.q, group, false},
                    {"k", f.k, group, false},
                    {"v", f.v, own, false},
                    {"i", f.i, own, false},
                    {"f", f.f, own, false},
                    {"dh", b.dh, own, false},
                    {"C0", f.initial_state.C, own, true},
                    {"n0", f.initial_state.n, own, true},
                    {"m0", f.initial_state.m, own, true},
                    {"dC_last", b.dlast_state.C, own, true},
                    {"dn_last", b.dlast_state.n, own, true}};
        for (const auto& row : rows) {
          const std::string name = row.name;
          const std::int64_t at_head = name == "q" || name == "k" ? 0 : head;
          const TensorView hit = row.state ? slice(slice(row.view, 0, sequence, 1), 1, at_head, 1)
                                           : slice(slice(row.view, 1, token, 1), 2, at_head, 1);
          const Values saved = gather(hit);
          for (const double poison : {nan, infinity, -infinity}) {
            overwrite(hit, Values(saved.size(), poison));
            const Snapshot hurt = run_both(problem);
            EXPECT_TRUE(same_bits(outside(problem, hurt, boundaries, sequence, row.reach),
                                  outside(problem, clean, boundaries, sequence, row.reach)))
                << label(c) << ": " << poison << " in " << name;
            // The test would be empty if the poison had been ignored. An input gate of minus infinity is no input,
            // and gates of plus infinity are open; those may leave all values finite, but not unchanged.
            EXPECT_FALSE(same_bits(hurt, clean)) << label(c) << ": " << poison << " in " << name;
          }
          overwrite(hit, saved);
        }
        EXPECT_TRUE(same_bits(run_both(problem), clean)) << label(c);
      }
    }
  }
}

}  // namespace
}  // namespace tfla::test
