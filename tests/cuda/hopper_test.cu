// The kernels of Hopper: that they are taken, and every shape, gate and regime against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>

#include "cuda/sm90/entry.h"
#include "testkit/tensor.h"
#include "tests/cuda/on_gpu.h"
#include "tests/support/support.h"

namespace tfla::test {

using reference::Regime;
using testkit::Case;
using testkit::gather;
using testkit::Layout;
using testkit::Problem;

Plan check_on_hopper(const Case& c, const std::function<void(Problem&)>& prepare, bool dn_last) {
  Problem problem(c);
  if (prepare) prepare(problem);
  if (c.last_state_grad && !dn_last) {
    MlstmBackward& args = problem.backward();
    const auto& shape = args.dlast_state.n.shape;
    overwrite(args.dlast_state.n, Values(static_cast<std::size_t>(shape[0] * shape[1] * shape[2])));
    args.dlast_state.n = {};
  }
  const testkit::Judge judge(problem, true);
  EXPECT_TRUE(runs_on_hopper(plan(problem.forward(), on_gpu))) << label(c);
  const Plan chosen = plan(problem.backward(), on_gpu);
  const bool wide = chosen.shape.dqk > 128 || chosen.shape.dhv > 256, bfloat16 = chosen.shape.dtype == DType::bfloat16;
  const bool in_reverse = on_hopper(chosen, Kernel::grad_states_v) || on_hopper(chosen, Kernel::grad_v_reverse);
  EXPECT_TRUE(runs_on_hopper(chosen)) << label(c);
  EXPECT_TRUE(has_hopper_gradients(chosen)) << label(c);
  const bool takes_reverse = bfloat16 && chosen.shape.dqk <= 256;
  if (!takes_reverse || wide) {
    EXPECT_EQ(in_reverse, takes_reverse) << label(c);
  }
  forward(problem.forward(), on_gpu);
  backward(problem.backward(), on_gpu);
  EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c);
  EXPECT_TRUE(within_bounds(judge.backward_errors(), c)) << label(c);
  return plan(problem.forward(), on_gpu);
}

namespace {

struct HopperShape {
  std::int64_t batch, tokens, heads, dqk, dhv;
  Layout layout = Layout::bthd;
  InputGate gate = InputGate::exponential;
  bool states = false;  // an initial state, and a gradient of C into the last one
  std::int64_t chunk = 128;
};

// Every size the Hopper kernels are compiled for, with full and partial panels, chunks and rows of the batch.
constexpr HopperShape hopper_shapes[] = {
    {1, 1, 1, 64, 64},
    {1, 128, 2, 128, 256},
    {2, 100, 3, 72, 200, Layout::bhtd, InputGate::sigmoid},
    {3, 1000, 2, 128, 256, Layout::bthd, InputGate::sigmoid, true},
    {2, 1024, 3, 128, 256, Layout::bhtd, InputGate::exponential, true},
    {1, 1000, 2, 64, 96, Layout::bhtd, InputGate::exponential, true},
    {2, 129, 2, 64, 200, Layout::fused, InputGate::sigmoid, true},
    {2, 1024, 1, 64, 256},
    {4, 255, 2, 128, 64, Layout::bthd, InputGate::exponential, true},
    {2, 300, 2, 72, 96, Layout::fused},
    {2, 1000, 3, 128, 192, Layout::bthd, InputGate::exponential, true},
    {1, 1024, 2, 8, 8, Layout::bthd, InputGate::sigmoid, true},
    {2, 1000, 9, 128, 256},  // 144 tiles: more than multiprocessors
    // More items of forward than multiprocessors, of one to three blocks: one after the other, and from nothing.
    {40, 150, 5, 72, 136},
    {40, 129, 5, 128, 200, Layout::bhtd},
    {40, 190, 5, 64, 136, Layout::fused, InputGate::sigmoid},
    {40, 60, 5, 128, 136, Layout::bthd, InputGate::sigmoid},
    // Segments that are summed up in pieces.
    {1, 16384, 40, 8, 8, Layout::bthd, InputGate::exponential, true},
    {1, 16000, 20, 8, 136, Layout::bhtd, InputGate::sigmoid, true},
    // Wide heads: keys by 128 columns of dqk, values by 256 of dhv.
    {2, 1000, 2, 256, 512, Layout::bthd, InputGate::exponential, true},
    {1, 1000, 3, 256, 512, Layout::fused, InputGate::sigmoid},
    {2, 129, 2, 256, 256, Layout::bhtd, InputGate::sigmoid, true},
    {3, 100, 2, 128, 512},
    {2, 1000, 2, 64, 320, Layout::bthd, InputGate::exponential, true},
    {2, 300, 3, 200, 264, Layout::bhtd, InputGate::exponential, true},
    {1, 1, 2, 136, 8},
    {2, 1000, 9, 256, 264, Layout::bthd, InputGate::sigmoid},  // 288 tiles
    // Forward in two kernels to a head.
    {2, 1000, 2, 512, 512, Layout::bthd, InputGate::exponential, true},
    {1, 1000, 2, 512, 256, Layout::fused, InputGate::sigmoid, true},
    {2, 129, 3, 320, 200, Layout::bhtd, InputGate::exponential},
    {1, 60, 2, 264, 64, Layout::bthd, InputGate::sigmoid},
    {1, 4000, 1, 384, 136, Layout::bthd, InputGate::exponential, true},
    {40, 150, 4, 272, 72},  // more items than multiprocessors
    // Other chunks than 128: longer ones in slices of the heads, the last of which may be smaller.
    {2, 300, 2, 72, 96, Layout::fused, InputGate::sigmoid, false, 64},
    {2, 1000, 5, 128, 256, Layout::bthd, InputGate::exponential, true, 256},
    {2, 1000, 4, 128, 256, Layout::bhtd, InputGate::sigmoid, true, 256},
    {1, 1000, 7, 64, 96, Layout::fused, InputGate::exponential, true, 512},
    {1, 1024, 3, 256, 512, Layout::bthd, InputGate::exponential, true, 1024},
    {3, 500, 6, 128, 64, Layout::bthd, InputGate::sigmoid, true, 4096},
    {1, 500, 3, 512, 264, Layout::bhtd, InputGate::exponential, true, 256},
};

Case case_of(const HopperShape& shape, DType dtype) {
  Case c = gpu_case({.batch = shape.batch,
                     .tokens = shape.tokens,
                     .qk_heads = shape.heads,
                     .heads = shape.heads,
                     .dqk = shape.dqk,
                     .dhv = shape.dhv,
                     .dtype = dtype});
  c.layout = shape.layout;
  c.options = {.gate = shape.gate, .chunk_size = shape.chunk};
  c.initial_state = c.last_state_grad = shape.states;
  return c;
}

// float16: shorter sequences, so that the reference takes less time; no room for the kernel of tall and narrow states,
// and one kernel's dqk.
void check_shapes_on_hopper(DType dtype) {
  const bool half = dtype == DType::float16;
  bool keep = false;
  std::int64_t pieces = 1;
  for (const HopperShape& shape : hopper_shapes) {
    keep = !keep;
    if (half && shape.dqk > (shape.dhv <= 64 ? 128 : 256)) continue;
    const bool shorter = half && shape.tokens > 300 && shape.tokens < 2000;
    Case c = case_of(shape, dtype);
    if (shorter) c.shape.tokens = shape.tokens * 3 / 8;
    c.options.keep = keep ? Keep::states : Keep::nothing;
    pieces = std::max(pieces, check_on_hopper(c).pieces);
  }
  EXPECT_GT(pieces, 1);
}

TEST_F(Cuda, GradientsOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  check_shapes_on_hopper(DType::bfloat16);
}

TEST_F(Cuda, Float16GradientsOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  check_shapes_on_hopper(DType::float16);
}

// Heads of dqk and dhv to 64, whose kernels have several blocks to a multiprocessor: every width, sequences that end at
// every place of a chunk, and more items and tiles than blocks.
TEST_F(Cuda, NarrowHeadsOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  constexpr std::int64_t most = 64, step = 8;
  constexpr std::int64_t lengths[] = {1, 60, 64, 65, 128, 129, 190, 300};
  constexpr Layout layouts[] = {Layout::bthd, Layout::bhtd, Layout::fused};
  int turn = 0;
  for (std::int64_t dqk = step; dqk <= most; dqk += step)
    for (std::int64_t dhv = step; dhv <= most; dhv += step, ++turn) {
      const HopperShape shape{.batch = 1 + turn % 2,
                              .tokens = lengths[turn % 8 ^ turn / 8],
                              .heads = 2,
                              .dqk = dqk,
                              .dhv = dhv,
                              .layout = layouts[turn % 3],
                              .gate = turn % 4 < 2 ? InputGate::exponential : InputGate::sigmoid,
                              .states = turn % 5 < 3};
      Case c = case_of(shape, DType::bfloat16);
      c.options.keep = turn % 3 < 2 ? Keep::states : Keep::nothing;
      check_on_hopper(c);
    }
  constexpr HopperShape many[] = {
      {40, 150, 16, 32, 32, Layout::bthd, InputGate::exponential, true},
      {40, 129, 16, 64, 64},
      {40, 200, 14, 24, 40, Layout::fused, InputGate::sigmoid},
      {1, 1000, 3, 32, 32, Layout::bhtd, InputGate::exponential, true},
      {2, 1024, 3, 64, 64, Layout::bthd, InputGate::exponential, true},
  };
  for (const HopperShape& shape : many)
    for (const bool keep : {false, true}) {
      Case c = case_of(shape, DType::bfloat16);
      c.options.keep = keep ? Keep::states : Keep::nothing;
      check_on_hopper(c);
    }
  for (const Regime regime : reference::all_regimes)
    for (const std::int64_t width : {32, 64}) {
      Case c = gpu_case(
          {.batch = 1, .tokens = 500, .qk_heads = 2, .heads = 2, .dqk = width, .dhv = width, .dtype = DType::bfloat16});
      c.regime = regime;
      c.options.keep = Keep::states;
      check_on_hopper(c);
    }
}

// dC and dV in one kernel: both columns of blocks, ends of sequences at every place of a chunk, segments with and
// without pieces, more tiles than multiprocessors.
TEST_F(Cuda, ReverseOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  constexpr HopperShape shapes[] = {
      {3, 1, 3, 256, 512, Layout::bthd, InputGate::exponential, true},
      {2, 64, 2, 136, 264, Layout::bhtd, InputGate::sigmoid, true},
      {1, 65, 2, 200, 72, Layout::fused},
      {2, 100, 2, 8, 264, Layout::bhtd, InputGate::sigmoid, true},
      {1, 128, 3, 72, 320, Layout::fused, InputGate::exponential, true},
      {2, 129, 2, 136, 40, Layout::bthd, InputGate::exponential, true},
      {1, 192, 2, 128, 264, Layout::bthd, InputGate::sigmoid},
      {2, 300, 30, 136, 136},
      {1, 1000, 2, 136, 8, Layout::bhtd, InputGate::sigmoid, true},
      {1, 4096, 2, 16, 264, Layout::bthd, InputGate::exponential, true},
      {1, 4033, 1, 136, 136, Layout::bthd, InputGate::exponential, true},
      {1, 65536, 1, 8, 264, Layout::bthd, InputGate::sigmoid, true},
      {2, 30000, 2, 8, 264, Layout::bhtd, InputGate::exponential, true},
      {1, 20000, 1, 136, 8, Layout::bthd, InputGate::exponential, true},
  };
  bool keep = false;
  std::int64_t segments = 1;
  for (const HopperShape& shape : shapes) {
    keep = !keep;
    Case c = case_of(shape, DType::bfloat16);
    c.options.chunk_size = 0;
    c.options.keep = keep ? Keep::states : Keep::nothing;
    check_on_hopper(c);
    c.shape.sequences = shape.batch;
    c.shape.longest = shape.tokens;
    segments = std::max(segments, plan(Operation::backward, c.shape, c.options, on_gpu).segments);
  }
  EXPECT_GT(segments, 1);
  for (const Regime regime : reference::all_regimes) {
    Case c = gpu_case(
        {.batch = 1, .tokens = 500, .qk_heads = 2, .heads = 2, .dqk = 136, .dhv = 264, .dtype = DType::bfloat16});
    c.regime = regime;
    check_on_hopper(c);
  }
}

Case half_case(std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv) {
  return gpu_case({.batch = 1,
                   .tokens = tokens,
                   .qk_heads = heads,
                   .heads = heads,
                   .dqk = dqk,
                   .dhv = dhv,
                   .dtype = DType::float16});
}

// Gradients of n, the exact one of the normalizer and one of the last state, for heads of any width.
TEST_F(Cuda, NormGradientsOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  struct Row {
    HopperShape shape;
    bool exact = true;
    Normalizer normalizer = Normalizer::automatic;
  };
  constexpr InputGate exponential = InputGate::exponential, sigmoid = InputGate::sigmoid;
  const Row rows[] = {
      {{1, 1, 1, 64, 64, Layout::bthd, exponential, true}, false},
      {{2, 300, 3, 72, 96, Layout::fused, exponential, true}},
      {{1, 1000, 2, 128, 256, Layout::bthd, exponential, true}},
      {{2, 129, 2, 64, 200, Layout::bhtd, sigmoid, true}, true, Normalizer::max},
      {{1, 1000, 2, 128, 192, Layout::bthd, sigmoid, true}, false},
      {{1, 640, 2, 8, 8, Layout::bthd, exponential, true}, false},
      {{2, 700, 10, 128, 256}},
      {{1, 8192, 2, 16, 24, Layout::bthd, exponential, true}},  // segments
      {{1, 700, 2, 256, 512, Layout::bthd, exponential, true}},
      {{1, 700, 2, 256, 512, Layout::bhtd, exponential, true}, false},
      {{2, 300, 3, 200, 264, Layout::fused, exponential, true}},
      {{3, 100, 2, 128, 512}},
      {{1, 400, 3, 64, 320, Layout::bthd, sigmoid, true}, true, Normalizer::max},
      {{1, 1, 2, 136, 72, Layout::bthd, exponential, true}, false},
      {{2, 500, 5, 128, 256, Layout::bthd, exponential, true, 256}},  // slices of the heads
      {{1, 500, 3, 256, 264, Layout::bthd, exponential, true, 1024}},
  };
  bool keep = false;
  for (const DType dtype : {DType::bfloat16, DType::float16})
    for (const Row& row : rows) {
      keep = !keep;
      Case c = case_of(row.shape, dtype);
      c.options.normalizer = row.normalizer;
      c.options.exact_normalizer_grad = row.exact;
      c.options.keep = keep ? Keep::states : Keep::nothing;
      check_on_hopper(c, {}, true);
    }
}

// trained_like without the exact gradient here: it has rows whose q.n cancels, and the error of den shows twice in
// theirs.
TEST_F(Cuda, NormGradientsInEveryRegimeOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  struct Row {
    std::int64_t dqk, dhv;
    bool exact;
  };
  for (const Regime regime : reference::all_regimes)
    for (const Row& row : {Row{128, 96, true}, Row{128, 72, false}, Row{256, 72, true}, Row{256, 96, false}}) {
      if (regime == Regime::trained_like && row.exact) continue;
      Case c = gpu_case({.batch = 1,
                         .tokens = 1024,
                         .qk_heads = 4,
                         .heads = 4,
                         .dqk = row.dqk,
                         .dhv = row.dhv,
                         .dtype = DType::bfloat16});
      c.regime = regime;
      c.options = {.exact_normalizer_grad = row.exact, .keep = row.exact ? Keep::states : Keep::nothing};
      c.initial_state = c.last_state_grad = !row.exact || row.dqk == 256;
      check_on_hopper(c, {}, true);
    }
}

// A gradient of the last n that is zero changes nothing but the kernels: <C, dC> comes from keys instead of dstates. In
// bfloat16 wide heads have it from keys either way.
TEST_F(Cuda, TracesAgreeWithDstatesOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  for (const Regime regime : {Regime::trained_like, Regime::never_forget, Regime::resets}) {
    Case c = gpu_case(
        {.batch = 1, .tokens = 1000, .qk_heads = 3, .heads = 3, .dqk = 256, .dhv = 264, .dtype = DType::float16});
    c.regime = regime;
    c.initial_state = c.last_state_grad = true;
    Problem problem(c);
    MlstmBackward& args = problem.backward();
    const auto& shape = args.dlast_state.n.shape;
    overwrite(args.dlast_state.n, Values(static_cast<std::size_t>(shape[0] * shape[1] * shape[2])));
    EXPECT_TRUE(on_hopper(plan(args, on_gpu), Kernel::grad_n));
    const Snapshot traces = run_both(problem, on_gpu);
    args.dlast_state.n = {};
    EXPECT_FALSE(on_hopper(plan(args, on_gpu), Kernel::grad_n));
    const Snapshot dstates = run_both(problem, on_gpu);
    for (const char* name : {"dq", "dk", "dv", "di"})
      EXPECT_TRUE(close(traces.at(name), dstates.at(name), 0)) << name << " " << label(c);
    EXPECT_TRUE(close(traces.at("df"), dstates.at("df"), 2 * testkit::allowed_error("df", c))) << label(c);
  }
}

// float16 has lifts in every kernel: all regimes of the gates, whose weights reach from 1e-7 to 1.
TEST_F(Cuda, Float16OnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  struct Gates {
    InputGate gate;
    Normalizer normalizer;
    std::int64_t chunk;
    bool states;
  };
  constexpr Gates all_gates[] = {{InputGate::exponential, Normalizer::automatic, 128, false},
                                 {InputGate::exponential, Normalizer::none, 64, true},
                                 {InputGate::sigmoid, Normalizer::automatic, 256, true},
                                 {InputGate::sigmoid, Normalizer::max, 512, false},
                                 {InputGate::log, Normalizer::automatic, 128, true}};
  std::size_t number = 0;
  for (const Regime regime : reference::all_regimes) {
    const auto check = [&](const Gates& gates, std::int64_t tokens, std::int64_t dqk) {
      Case c = half_case(tokens, 4, dqk, 2 * dqk);
      c.regime = regime;
      c.options = {.gate = gates.gate, .normalizer = gates.normalizer, .chunk_size = gates.chunk};
      c.initial_state = c.last_state_grad = gates.states;
      check_on_hopper(c);
    };
    for (const Gates& gates : all_gates) check(gates, 300, 128);
    check(all_gates[number++ % std::size(all_gates)], 200, 256);
  }
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
    Case c = half_case(65536, 1, 16, 24);
    c.options.gate = gate;
    EXPECT_GT(check_on_hopper(c).segments, 1);
  }
}

// Keys, values and input gates that float16 would have no room for without lifts. dh makes up for it, so that gradients
// have their digits.
TEST_F(Cuda, Float16RangesOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  struct Range {
    double q, k, v, dh, i;
    InputGate gate = InputGate::exponential;
  };
  const auto change = [](const TensorView& view, double factor, double shift) {
    Values values = gather(view);
    for (double& x : values) x = factor * x + shift;
    overwrite(view, values);
  };
  for (const Range& range : {Range{1, 1e-3, 1e-3, 1000, 0},
                             {1, 100, 100, 0.01, 0},
                             {1e-2, 100, 100, 0.01, 0, InputGate::sigmoid},
                             {1, 1e-3, 100, 1, 0},
                             {1, 1000, 1e-2, 1, 0},
                             {30, 30, 300, 1e-3, 0},
                             {1, 1, 16, 16, -10},
                             {1, 1, 1000, 100, -10, InputGate::sigmoid},
                             {1, 1, 1000, 100, -10, InputGate::log},
                             {1, 30, 30, 1, 20}}) {
    for (const std::int64_t dqk : {128, 256}) {
      Case c = half_case(dqk > 128 ? 150 : 300, 4, dqk, 2 * dqk);
      c.regime = Regime::randn;
      c.options.gate = range.gate;
      SCOPED_TRACE(testing::Message() << "k " << range.k << " v " << range.v << " i " << range.i);
      check_on_hopper(c, [&](Problem& problem) {
        const MlstmBackward& args = problem.backward();
        change(args.q, range.q, 0);
        change(args.k, range.k, 0);
        change(args.v, range.v, 0);
        change(args.dh, range.dh, 0);
        change(args.i, 1, range.i);
      });
    }
  }
}

// Forward gates blocks that forget much in another way than the rest (forward/outputs.cuh): blocks of 64 tokens that
// leave from all to 2^-56 of what was before them; and a first token that leaves 2^-45 of an initial state so large
// that even that counts.
TEST_F(Cuda, ForgettingOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
    for (const bool large : {false, true}) {
      Case c = gpu_case(
          {.batch = 2, .tokens = 700, .qk_heads = 2, .heads = 2, .dqk = 128, .dhv = 256, .dtype = DType::bfloat16});
      c.options.gate = gate;
      c.initial_state = true;
      SCOPED_TRACE(testing::Message() << label(c) << (large ? " from a large state" : ""));
      Problem problem(c);
      const MlstmForward& args = problem.forward();
      Values f = gather(args.f);
      for (std::size_t e = 0; e < f.size(); ++e) {
        const std::size_t token = e / 2 % 700;
        double bits = 8.0 * static_cast<double>(token / 64 % 8) / 64;  // that a token forgets
        if (large) bits = token == 0 ? 45 : 0;
        f[e] = bits > 0 ? -std::log(std::exp2(bits) - 1) : 12;
      }
      overwrite(args.f, f);
      for (const TensorView& view : {args.initial_state.C, args.initial_state.n}) {
        Values values = gather(view);
        for (double& x : values) x *= large ? 0x1p50 : 1.0;
        overwrite(view, values);
      }
      const testkit::Judge judge(problem, false);
      EXPECT_TRUE(runs_on_hopper(plan(args, on_gpu)));
      forward(args, on_gpu);
      EXPECT_TRUE(within_bounds(judge.forward_errors(), c));
    }
  }
}

// Gates given as logarithms may let a state grow, here by 5 bits a token of its second block. Its H is right while it
// is finite, and the same where the block goes on till nothing is.
TEST_F(Cuda, GrowingOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const auto case_of = [&](std::int64_t tokens) {
    Case c = gpu_case({.tokens = tokens, .qk_heads = 2, .heads = 2, .dqk = 128, .dhv = 256, .dtype = DType::bfloat16});
    c.options.gate = InputGate::log;
    return c;
  };
  const auto grow = [](const MlstmForward& args) {
    Values f = gather(args.f), i = gather(args.i);
    for (std::size_t e = 0; e < f.size(); ++e) f[e] = e / 2 < 64 ? -0.01 : 5 * std::log(2.0);
    for (double& x : i) x = -1;
    overwrite(args.f, f);
    overwrite(args.i, i);
  };
  const Case c = case_of(84);
  Problem finite(c), beyond(case_of(128));
  grow(finite.forward());
  grow(beyond.forward());
  const auto continue_from = [](const TensorView& part, const TensorView& whole) {
    const Values first = gather(part);
    Values all = gather(whole);
    std::copy(first.begin(), first.end(), all.begin());
    overwrite(whole, all);
  };
  continue_from(finite.forward().q, beyond.forward().q);
  continue_from(finite.forward().k, beyond.forward().k);
  continue_from(finite.forward().v, beyond.forward().v);
  const testkit::Judge judge(finite, false);
  for (Problem* problem : {&finite, &beyond}) {
    EXPECT_TRUE(runs_on_hopper(plan(problem->forward(), on_gpu)));
    forward(problem->forward(), on_gpu);
  }
  EXPECT_TRUE(within_bounds(judge.forward_errors(), c));
  const Values h = gather(finite.forward().h), longer = gather(beyond.forward().h);
  for (std::size_t e = 0; e < h.size(); ++e) ASSERT_EQ(longer[e], h[e]) << e;
}

// States that forward keeps carry their errors to the end of the sequence: every regime of the gates, more heads than
// multiprocessors have room for at a time, and dhv that takes the kernel with 64 columns to a block.
TEST_F(Cuda, WideHeadsKeepStatesOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const auto check = [&](Regime regime, const MlstmShape& shape) {
    Case c = gpu_case(shape);
    c.regime = regime;
    c.options.keep = Keep::states;
    Problem problem(c);
    const testkit::Judge judge(problem, true);
    EXPECT_EQ(plan(problem.forward(), on_gpu).keep, Keep::states) << label(c);
    forward(problem.forward(), on_gpu);
    backward(problem.backward(), on_gpu);
    EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c);
    EXPECT_TRUE(within_bounds(judge.backward_errors(), c)) << label(c);
  };
  const auto shape = [](std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t dqk,
                        std::int64_t dhv) {
    return MlstmShape{.batch = batch,
                      .tokens = tokens,
                      .qk_heads = heads,
                      .heads = heads,
                      .dqk = dqk,
                      .dhv = dhv,
                      .dtype = DType::bfloat16};
  };
  for (const Regime regime : reference::all_regimes) check(regime, shape(1, 1024, 4, 256, 512));
  check(Regime::randn, shape(2, 300, 20, 256, 512));
  check(Regime::randn, shape(2, 300, 3, 200, 64));
  check(Regime::randn, shape(1, 129, 2, 136, 40));
}

TEST_F(Cuda, LongerChunksNeedLessMemoryOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const MlstmShape shape{.batch = 8,
                         .tokens = 8192,
                         .qk_heads = 16,
                         .heads = 16,
                         .dqk = 256,
                         .dhv = 512,
                         .sequences = 8,
                         .longest = 8192,
                         .dtype = DType::bfloat16};
  std::size_t before = std::numeric_limits<std::size_t>::max();
  for (const std::int64_t chunk : {128, 256, 512, 1024, 2048}) {
    const Plan chosen = plan(Operation::backward, shape, {.chunk_size = chunk, .keep = Keep::states}, on_gpu);
    EXPECT_TRUE(has_hopper_gradients(chosen));
    EXPECT_EQ(chosen.slices, chunk / 128);
    EXPECT_LT(chosen.scratch_bytes + chosen.saved_bytes, before);
    before = chosen.scratch_bytes + chosen.saved_bytes;
  }
}

// A NaN stays in its head, though a box of the accelerator would reach into the next one's rows.
TEST_F(Cuda, NanStaysInItsHeadOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  Case c =
      gpu_case({.batch = 2, .tokens = 200, .qk_heads = 3, .heads = 3, .dqk = 72, .dhv = 96, .dtype = DType::bfloat16});
  c.options.chunk_size = 128;
  Problem problem(c);
  const Snapshot clean = run_both(problem, on_gpu);
  Values v = gather(problem.forward().v);
  for (std::int64_t column = 0; column < 96; ++column) v[static_cast<std::size_t>(5 * 3 + 1) * 96 + column] = NAN;
  overwrite(problem.forward().v, v);
  EXPECT_TRUE(has_hopper_gradients(plan(problem.backward(), on_gpu)));
  const Snapshot dirty = run_both(problem, on_gpu);
  for (const char* name : {"dq", "dk", "dv", "di", "df"}) {
    const std::size_t width = clean.at(name).size() / (2 * 200 * 3);
    for (std::size_t e = 0; e < clean.at(name).size(); ++e) {
      const std::size_t head = e / width % 3, batch = e / width / (200 * 3);
      if (batch == 0 && head == 1) continue;
      ASSERT_EQ(dirty.at(name)[e], clean.at(name)[e]) << name << " " << e;
    }
  }
}

}  // namespace
}  // namespace tfla::test
