// Runs of short packed sequences, which kernels take for one sequence: what one leaves must not reach the next.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/backend.h"
#include "testkit/tensor.h"
#include "tests/cuda/device_memory.h"
#include "tests/cuda/on_gpu.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::Regime;
using testkit::Case;
using testkit::gather;
using testkit::Problem;

using Lengths = std::vector<std::int64_t>;

constexpr Execution portable{.device = Device::cuda, .portable = true};

std::vector<std::int64_t> boundaries(const Lengths& lengths) {
  std::vector<std::int64_t> sums{0};
  for (const std::int64_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

Lengths repeated(const Lengths& lengths, int times) {
  Lengths all;
  for (; times > 0; --times) all.insert(all.end(), lengths.begin(), lengths.end());
  return all;
}

// Runs begin and end in the middle of chunks, have one sequence or hundreds, end at a chunk's end; the long sequence
// lies over windows that no sequence begins in, and in segments.
Lengths with_a_long_one() {
  Lengths all = repeated({3, 0, 5, 1, 1, 32}, 9);
  all.push_back(3000);
  for (const std::int64_t length : repeated({64, 0, 2, 62, 128, 7}, 4)) all.push_back(length);
  return all;
}

struct Heads {
  std::int64_t heads, dqk, dhv;
};

// Without states, and with padding behind the last sequence.
Case run_case(const Lengths& lengths, const Heads& heads, DType dtype) {
  Case c = gpu_case({.batch = 1,
                     .tokens = boundaries(lengths).back() + 9,
                     .qk_heads = heads.heads,
                     .heads = heads.heads,
                     .dqk = heads.dqk,
                     .dhv = heads.dhv,
                     .dtype = dtype});
  c.cu_seqlens = boundaries(lengths);
  c.regime = Regime::randn;
  c.last_state = false;
  return c;
}

// Runs a case against the reference, in runs, by the kernels that the plan chooses or the portable ones.
template <class Prepare>
void check_runs(const Case& c, const Execution& execution, const Prepare& prepare) {
  Problem problem(c);
  prepare(problem);
  const testkit::Judge judge(problem, true);
  EXPECT_GT(plan(problem.forward(), execution).run, 0) << label(c);
  EXPECT_GT(plan(problem.backward(), execution).run, 0) << label(c);
  forward(problem.forward(), execution);
  backward(problem.backward(), execution);
  EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c);
  EXPECT_TRUE(within_bounds(judge.backward_errors(), c)) << label(c);
}
void check_runs(const Case& c, const Execution& execution) {
  check_runs(c, execution, [](Problem&) {});
}

constexpr DType types[] = {DType::bfloat16, DType::float16, DType::float32};
constexpr InputGate gates[] = {InputGate::exponential, InputGate::sigmoid, InputGate::log};

TEST_F(Cuda, RunsOfEveryLength) {
  for (const Lengths& lengths : {repeated({1, 2, 3, 4, 5}, 60), Lengths(700, 1), Lengths(40, 32), Lengths(9, 128),
                                 repeated({0, 200, 3}, 10), with_a_long_one()})
    for (const DType dtype : types)
      for (const InputGate gate : gates) {
        Case c = run_case(lengths, {2, 64, 72}, dtype);
        c.options.gate = gate;
        check_runs(c, on_gpu);
        check_runs(c, portable);
      }
}

// Kernels of all widths, with normalizers and without, the denominators kept or made again.
TEST_F(Cuda, RunsOfEveryWidth) {
  int number = 0;
  for (const Heads& heads :
       {Heads{1, 32, 32}, {2, 64, 200}, {2, 128, 256}, {1, 128, 264}, {2, 256, 512}, {1, 200, 136}, {3, 20, 37}})
    for (const DType dtype : types)
      for (const Normalizer normalizer : {Normalizer::max, Normalizer::none}) {
        Case c = run_case(repeated({32, 1, 17, 0, 90, 4}, 4), heads, dtype);
        c.options.gate = gates[number % 3];
        c.options.normalizer = normalizer;
        c.options.keep = number % 2 == 0 ? Keep::denominators : Keep::nothing;
        c.options.chunk_size = number % 5 == 4 ? 256 : 0;  // slices of the heads, and chunks of two slabs
        ++number;
        check_runs(c, on_gpu);
        check_runs(c, portable);
      }
}

// n in runs. A sequence of one token has a gradient that is the difference of large numbers.
TEST_F(Cuda, RunsWithTheExactNormalizerGradient) {
  for (const Heads& heads : {Heads{2, 64, 64}, {2, 128, 256}, {1, 256, 264}})
    for (const DType dtype : types) {
      Case c = run_case(repeated({32, 100, 0, 64, 77}, 3), heads, dtype);
      c.options.exact_normalizer_grad = true;
      check_runs(c, on_gpu);
      check_runs(c, portable);
    }
}

// The max state of a sequence may be large at its end, and what it holds must not scale down the next one. With a large
// eps results depend on the max state itself. Forget gates that are nearly closed do not take the place of a reset, nor
// add up with it to something else.
TEST_F(Cuda, RunsWithSpikesAndClosedGates) {
  const Lengths lengths = repeated({5, 32, 1, 0, 70, 3}, 5);
  const std::vector<std::int64_t> starts = boundaries(lengths);
  const auto change = [](const TensorView& view, const auto& value_of) {
    Values values = gather(view);
    for (std::size_t e = 0; e < values.size(); ++e) values[e] = value_of(static_cast<std::int64_t>(e), values[e]);
    overwrite(view, values);
  };
  for (const DType dtype : types)
    for (const bool closed : {false, true}) {
      Case c = run_case(lengths, {1, 64, 128}, dtype);
      c.options.eps = 0.5;
      const auto is_last = [&](std::int64_t token) {
        return std::find(starts.begin() + 1, starts.end(), token + 1) != starts.end();
      };
      const auto prepare = [&](Problem& problem) {
        const MlstmForward& args = problem.forward();
        change(args.i, [&](std::int64_t token, double i) { return is_last(token) ? i + 60 : i; });
        if (closed) change(args.f, [](std::int64_t token, double f) { return token % 7 == 3 ? -30.0 : f; });
      };
      check_runs(c, on_gpu, prepare);
      check_runs(c, portable, prepare);
    }
}

// Sequences that a run has beside the changed one keep their bits.
TEST_F(Cuda, RunsKeepSequencesApart) {
  const Lengths lengths = repeated({5, 32, 1, 70}, 6);
  const std::vector<std::int64_t> starts = boundaries(lengths);
  constexpr std::size_t changed = 9;
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    const Case c = run_case(lengths, {2, 128, 256}, dtype);
    Problem problem(c);
    const Snapshot before = run_both(problem, on_gpu);
    const MlstmBackward& args = problem.backward();
    for (const TensorView& view : {args.q, args.k, args.v, args.i, args.f, args.dh}) {
      Values values = gather(view);
      const auto width = static_cast<std::ptrdiff_t>(values.size()) / c.shape.tokens;
      std::for_each(values.begin() + width * starts[changed], values.begin() + width * starts[changed + 1],
                    [](double& x) { x = 1 - 2 * x; });
      overwrite(view, values);
    }
    const Snapshot after = run_both(problem, on_gpu);
    for (const char* name : {"h", "dq", "dk", "dv", "di", "df"}) {
      const auto width = static_cast<std::int64_t>(before.at(name).size()) / c.shape.tokens;
      for (std::int64_t e = 0; e < width * c.shape.tokens; ++e) {
        const std::int64_t token = e / width;
        if (token >= starts[changed] && token < starts[changed + 1]) continue;
        const auto at = static_cast<std::size_t>(e);
        ASSERT_EQ(after.at(name)[at], before.at(name)[at]) << label(c) << ", " << name << " of token " << token;
      }
    }
  }
}

TEST_F(Cuda, RunsRepeat) {
  for (const DType dtype : types) {
    Problem problem(run_case(repeated({0, 70, 3, 1}, 40), {4, 64, 64}, dtype));
    const Snapshot expected = run_both(problem, on_gpu);
    for (int run = 0; run < 50; ++run) ASSERT_TRUE(same_bits(run_both(problem, on_gpu), expected));
  }
}

// A call recorded once, with other boundaries at every replay: the plan knows only how many sequences there are.
TEST_F(Cuda, RunsInGraphsFollowBoundaries) {
  Case c = run_case({130, 0, 321, 249}, {2, 64, 96}, DType::bfloat16);
  Problem problem(c);
  const Plan plans[2] = {plan(problem.forward(), on_gpu), plan(problem.backward(), on_gpu)};
  EXPECT_GT(plans[0].run, 0);
  EXPECT_GT(plans[1].run, 0);
  const DeviceMemory memory(static_cast<std::int64_t>(plans[0].scratch_bytes + plans[1].scratch_bytes));
  ASSERT_NE(memory.data, nullptr);
  auto* scratch = static_cast<std::byte*>(memory.data);
  cudaStream_t stream{};
  cudaGraph_t graph{};
  cudaGraphExec_t recorded{};
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  forward(problem.forward(), plans[0], std::span(scratch, plans[0].scratch_bytes), stream);
  backward(problem.backward(), plans[1], std::span(scratch, plans[1].scratch_bytes), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&recorded, graph, 0), cudaSuccess);
  auto* numbers = static_cast<std::int64_t*>(const_cast<void*>(problem.forward().cu_seqlens.data));
  for (const std::vector<std::int64_t>& now : {std::vector<std::int64_t>{0, 130, 130, 451, 700},
                                               {0, 1, 2, 3, 700},
                                               {0, 700, 700, 700, 700},
                                               {0, 64, 65, 66, 67}}) {
    std::copy(now.begin(), now.end(), numbers);
    const Snapshot expected = run_both(problem, on_gpu);
    problem.poison();
    ASSERT_EQ(cudaGraphLaunch(recorded, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    Snapshot replayed = snapshot(problem.forward());
    replayed.merge(snapshot(problem.backward()));
    EXPECT_TRUE(same_bits(replayed, expected)) << "first sequence ends at " << now[1];
  }
  cudaGraphExecDestroy(recorded);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// As BadBoundariesStayInTheTensors. Every row is written all the same where the last boundary is not before the first.
TEST_F(Cuda, BadBoundariesOfRunsStayInTheTensors) {
  for (const DType dtype : types) {
    Problem problem(run_case({300, 300, 600}, {1, 64, 96}, dtype));
    auto* numbers = static_cast<std::int64_t*>(const_cast<void*>(problem.forward().cu_seqlens.data));
    for (const std::vector<std::int64_t>& bad : {std::vector<std::int64_t>{0, 1200, 0, 1200},
                                                 {700, 100, 5000, -3},
                                                 {-1, 1300, 1201, 1300},
                                                 {1200, 0, 1200, 0}}) {
      std::copy(bad.begin(), bad.end(), numbers);
      EXPECT_GT(plan(problem.forward(), on_gpu).run, 0);
      forward(problem.forward(), on_gpu);
      backward(problem.backward(), on_gpu);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "second boundary " << bad[1];
    }
  }
}

// Many short sequences with states, which are not merged: their list and their scan take time that grows with their
// number alone.
TEST_F(Cuda, ThousandsOfShortSequencesWithStates) {
  for (const DType dtype : types) {
    Case c = run_case(repeated({2, 0, 1}, 1500), {1, 8, 8}, dtype);
    c.initial_state = c.last_state = true;
    Problem problem(c);
    const testkit::Judge judge(problem, true);
    EXPECT_EQ(plan(problem.forward(), on_gpu).run, 0);
    forward(problem.forward(), on_gpu);
    backward(problem.backward(), on_gpu);
    EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c);
    EXPECT_TRUE(within_bounds(judge.backward_errors(), c)) << label(c);
  }
}

}  // namespace
}  // namespace tfla::test
