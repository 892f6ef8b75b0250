// What only a GPU can get wrong: grids and tensors beyond 16 and 31 bits, streams, graphs, bitwise repeats.
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <limits>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/sm90/stages.h"
#include "reference/tensor.h"
#include "reference/values.h"
#include "support.h"

namespace tfla::test {
namespace {

using reference::Case;
using reference::gather;
using reference::Layout;
using reference::Problem;
using reference::Regime;
using reference::Tensor;

constexpr Execution on_gpu{.device = Device::cuda};

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  }
};

Case gpu_case(const MlstmShape& shape) {
  Case c;
  c.regime = Regime::trained_like;
  c.shape = shape;
  c.device = Device::cuda;
  return c;
}

TEST_F(Cuda, SeventyThousandHeadsAndRows) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case c = gpu_case({.batch = 35000, .tokens = 3, .qk_heads = 1, .heads = 2, .dqk = 8, .dhv = 8, .dtype = dtype});
    c.initial_state = true;
    Problem problem(c);
    const reference::Judge judge(problem, true);
    forward(problem.forward(), on_gpu);
    backward(problem.backward(), on_gpu);
    EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c);
    EXPECT_TRUE(within_bounds(judge.backward_errors(), c)) << label(c);
  }
}

TEST_F(Cuda, SameBitsFromRunToRun) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const bool keep : {false, true}) {
      Case c =
          gpu_case({.batch = 2, .tokens = 1000, .qk_heads = 2, .heads = 4, .dqk = 128, .dhv = 256, .dtype = dtype});
      c.options.exact_normalizer_grad = true;
      c.options.keep_states = keep;
      c.initial_state = c.last_state_grad = true;
      Problem problem(c);
      const Snapshot expected = run_both(problem, on_gpu);
      for (int run = 0; run < 3; ++run) EXPECT_TRUE(same_bits(run_both(problem, on_gpu), expected)) << label(c);
    }
  }
}

// A call recorded once, with other lengths and other data at every replay.
TEST_F(Cuda, GraphsFollowDataAndLengths) {
  Case c =
      gpu_case({.batch = 1, .tokens = 700, .qk_heads = 1, .heads = 2, .dqk = 64, .dhv = 96, .dtype = DType::bfloat16});
  c.cu_seqlens = {0, 130, 130, 451, 700};
  c.initial_state = true;
  c.options.keep_states = true;
  Problem problem(c);
  const Plan plans[2] = {plan(problem.forward(), on_gpu), plan(problem.backward(), on_gpu)};
  std::byte* scratch = nullptr;
  ASSERT_EQ(cudaMalloc(&scratch, plans[0].scratch_bytes + plans[1].scratch_bytes), cudaSuccess);
  cudaStream_t stream{};
  cudaGraph_t graph{};
  cudaGraphExec_t recorded{};
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  forward(problem.forward(), plans[0], std::span(scratch, plans[0].scratch_bytes), stream);
  backward(problem.backward(), plans[1], std::span(scratch, plans[1].scratch_bytes), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&recorded, graph, 0), cudaSuccess);

  auto* lengths = static_cast<std::int64_t*>(const_cast<void*>(problem.forward().cu_seqlens.data));
  for (const std::vector<std::int64_t>& now :
       {std::vector<std::int64_t>{0, 130, 130, 451, 700}, {0, 1, 2, 3, 700}, {0, 700, 700, 700, 700}}) {
    std::copy(now.begin(), now.end(), lengths);
    Values q = gather(problem.forward().q);
    for (double& x : q) x = -0.5 * x;
    overwrite(problem.forward().q, q);
    const Snapshot expected = run_both(problem, on_gpu);
    problem.poison();
    ASSERT_EQ(cudaGraphLaunch(recorded, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    Snapshot replayed = snapshot(problem.forward());
    replayed.merge(snapshot(problem.backward()));
    EXPECT_TRUE(same_bits(replayed, expected)) << "second sequence ends at " << now[2];
  }
  cudaGraphExecDestroy(recorded);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  cudaFree(scratch);
}

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
    // Other chunks than 128: longer ones in slices of the heads, the last of which may be smaller.
    {2, 300, 2, 72, 96, Layout::fused, InputGate::sigmoid, false, 64},
    {2, 1000, 5, 128, 256, Layout::bthd, InputGate::exponential, true, 256},
    {2, 1000, 4, 128, 256, Layout::bhtd, InputGate::sigmoid, true, 256},
    {1, 1000, 7, 64, 96, Layout::fused, InputGate::exponential, true, 512},
    {1, 1024, 3, 256, 512, Layout::bthd, InputGate::exponential, true, 1024},
    {3, 500, 6, 128, 64, Layout::bthd, InputGate::sigmoid, true, 4096},
};

// Runs a case against the reference, on the kernels of Hopper. A gradient of n is left to the portable ones. prepare
// changes its inputs. Returns the plan of forward.
Plan check_on_hopper(const Case& c, bool gradients, const std::function<void(Problem&)>& prepare = {}) {
  Problem problem(c);
  if (prepare) prepare(problem);
  if (c.last_state_grad) {
    MlstmBackward& args = problem.backward();
    const auto& shape = args.dlast_state.n.shape;
    overwrite(args.dlast_state.n, Values(static_cast<std::size_t>(shape[0] * shape[1] * shape[2])));
    args.dlast_state.n = {};
  }
  const reference::Judge judge(problem, true);
  EXPECT_TRUE(plan(problem.forward(), on_gpu).hopper) << label(c);
  EXPECT_TRUE(plan(problem.backward(), on_gpu).hopper) << label(c);
  EXPECT_EQ(plan(problem.backward(), on_gpu).hopper_gradients, gradients) << label(c);
  forward(problem.forward(), on_gpu);
  backward(problem.backward(), on_gpu);
  EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c);
  EXPECT_TRUE(within_bounds(judge.backward_errors(), c)) << label(c);
  return plan(problem.forward(), on_gpu);
}

// float16: shorter sequences, so that the reference takes less time; no room for the kernel of tall and narrow states.
void check_shapes_on_hopper(DType dtype) {
  const bool half = dtype == DType::float16;
  bool keep = false;
  std::int64_t pieces = 1;
  for (const HopperShape& shape : hopper_shapes) {
    keep = !keep;
    if (half && shape.dqk > 128 && shape.dhv <= 64) continue;
    const bool shorter = half && shape.tokens > 300 && shape.tokens < 2000;
    Case c = gpu_case({.batch = shape.batch,
                       .tokens = shorter ? shape.tokens * 3 / 8 : shape.tokens,
                       .qk_heads = shape.heads,
                       .heads = shape.heads,
                       .dqk = shape.dqk,
                       .dhv = shape.dhv,
                       .dtype = dtype});
    c.layout = shape.layout;
    c.options = {.gate = shape.gate, .chunk_size = shape.chunk, .keep_states = keep};
    c.initial_state = c.last_state_grad = shape.states;
    pieces = std::max(pieces, check_on_hopper(c, true).pieces);
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

Case half_case(std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv) {
  return gpu_case({.batch = 1,
                   .tokens = tokens,
                   .qk_heads = heads,
                   .heads = heads,
                   .dqk = dqk,
                   .dhv = dhv,
                   .dtype = DType::float16});
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
      check_on_hopper(c, true);
    };
    for (const Gates& gates : all_gates) check(gates, 300, 128);
    check(all_gates[number++ % std::size(all_gates)], 200, 256);
  }
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
    Case c = half_case(65536, 1, 16, 24);
    c.options.gate = gate;
    EXPECT_GT(check_on_hopper(c, true).segments, 1);
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
      check_on_hopper(c, true, [&](Problem& problem) {
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

using Lengths = std::vector<std::int64_t>;

std::vector<std::int64_t> boundaries(const Lengths& lengths) {
  std::vector<std::int64_t> sums{0};
  for (const std::int64_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

struct PackedShape {
  Lengths lengths;
  std::int64_t qk_heads, heads, dqk, dhv;
  Layout layout = Layout::bthd;
  InputGate gate = InputGate::exponential;
  bool states = false;  // as in HopperShape
  std::int64_t chunk = 0;
};

// Sequences that end at, before and after the end of a tile, empty ones first, last and between, and one that is long
// enough for segments.
const Lengths mixed{0, 65, 1000, 0, 0, 1, 128, 63, 200, 64, 0};
const PackedShape packed_shapes[] = {
    {{1}, 1, 1, 64, 64},
    {{300}, 2, 2, 128, 256, Layout::bthd, InputGate::sigmoid, true},
    {mixed, 2, 2, 128, 256, Layout::bthd, InputGate::exponential, true},
    {mixed, 2, 2, 128, 256, Layout::bhtd, InputGate::sigmoid},
    {mixed, 3, 3, 72, 200, Layout::fused, InputGate::exponential, true},
    {mixed, 1, 1, 64, 96, Layout::bthd, InputGate::sigmoid, true},
    {mixed, 2, 2, 128, 192},
    {mixed, 2, 4, 64, 64, Layout::bthd, InputGate::exponential, true},
    {{0, 2500, 0}, 2, 2, 128, 256, Layout::bthd, InputGate::exponential, true},
    {{1, 3000, 700, 129}, 1, 1, 8, 8, Layout::bhtd, InputGate::sigmoid, true},
    {{127, 129, 1, 1, 1, 511}, 9, 9, 128, 256},
    {Lengths(200, 3), 2, 2, 64, 200, Layout::bthd, InputGate::exponential, true},
    // Wide heads.
    {mixed, 1, 1, 256, 128, Layout::fused, InputGate::exponential, true},
    {mixed, 2, 2, 256, 512, Layout::bthd, InputGate::exponential, true},
    {mixed, 3, 3, 200, 264, Layout::bhtd, InputGate::sigmoid, true},
    {mixed, 2, 2, 64, 320, Layout::bthd, InputGate::sigmoid},
    {{1}, 2, 2, 136, 8},
    {{127, 129, 1, 1, 1, 511}, 9, 9, 256, 264},
    // Longer chunks: slices of the heads.
    {mixed, 5, 5, 128, 256, Layout::bthd, InputGate::exponential, true, 256},
    {mixed, 7, 7, 64, 96, Layout::fused, InputGate::sigmoid, true, 512},
    {mixed, 3, 3, 256, 512, Layout::bhtd, InputGate::exponential, true, 1024},
    {mixed, 2, 4, 64, 64, Layout::bthd, InputGate::exponential, true, 256},
};

TEST_F(Cuda, PackedOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  bool keep = false;
  for (const PackedShape& shape : packed_shapes) {
    keep = !keep;
    Case c = gpu_case({.batch = 1,
                       .tokens = boundaries(shape.lengths).back(),
                       .qk_heads = shape.qk_heads,
                       .heads = shape.heads,
                       .dqk = shape.dqk,
                       .dhv = shape.dhv,
                       .dtype = DType::bfloat16});
    c.cu_seqlens = boundaries(shape.lengths);
    c.layout = shape.layout;
    c.options = {.gate = shape.gate, .chunk_size = shape.chunk, .keep_states = keep};
    c.initial_state = c.last_state_grad = shape.states;
    check_on_hopper(c, shape.qk_heads == shape.heads);
  }
}

// The part of a call's views that a sequence owns, as a dense call.
template <class Args>
void narrow_rows(Args& args, std::int64_t begin, std::int64_t length) {
  const auto cut = [&](auto&... views) { ((views = slice(views, 1, begin, length)), ...); };
  args.cu_seqlens = {};
  cut(args.q, args.k, args.v, args.i, args.f);
  if constexpr (std::is_same_v<Args, MlstmForward>)
    cut(args.h);
  else
    cut(args.dh, args.dq, args.dk, args.dv, args.di, args.df);
}

// Bit for bit, which says that no sequence sees another; those of more than one segment would add up in another order.
TEST_F(Cuda, PackedEqualsSeparateOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const Lengths lengths{1, 63, 0, 64, 65, 128, 200, 127, 129, 500};
  const std::vector<std::int64_t> starts = boundaries(lengths);
  for (const std::int64_t dqk : {64, 128, 256}) {
    Case c = gpu_case({.batch = 1,
                       .tokens = starts.back(),
                       .qk_heads = 3,
                       .heads = 3,
                       .dqk = dqk,
                       .dhv = 2 * dqk,
                       .dtype = DType::bfloat16});
    c.cu_seqlens = starts;
    Problem problem(c);
    EXPECT_TRUE(plan(problem.backward(), on_gpu).hopper_gradients);
    const Snapshot packed = run_both(problem, on_gpu);
    problem.poison();
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      MlstmForward first = problem.forward();
      MlstmBackward second = problem.backward();
      narrow_rows(first, starts[s], lengths[s]);
      narrow_rows(second, starts[s], lengths[s]);
      const auto state = [&](auto& view) { view = slice(view, 0, static_cast<std::int64_t>(s), 1); };
      state(first.last_state.C);
      state(first.last_state.n);
      state(first.last_state.m);
      forward(first, on_gpu);
      backward(second, on_gpu);
    }
    Snapshot separate = snapshot(problem.forward());
    separate.merge(snapshot(problem.backward()));
    EXPECT_TRUE(same_bits(packed, separate)) << label(c);
  }
}

// The host cannot see boundaries on a GPU. Bad ones give bad results, but lead nowhere else: compute-sanitizer sees it.
TEST_F(Cuda, BadBoundariesStayInTheTensors) {
  Case c =
      gpu_case({.batch = 1, .tokens = 1200, .qk_heads = 1, .heads = 1, .dqk = 64, .dhv = 96, .dtype = DType::bfloat16});
  c.cu_seqlens = {0, 300, 600, 1200};
  c.initial_state = true;
  c.options.keep_states = true;
  Problem problem(c);
  auto* numbers = static_cast<std::int64_t*>(const_cast<void*>(problem.forward().cu_seqlens.data));
  for (const std::vector<std::int64_t>& bad : {std::vector<std::int64_t>{0, 1200, 0, 1200},
                                               {700, 100, 5000, -3},
                                               {-1, 1300, 1201, 1300},
                                               {1200, 0, 1200, 0}}) {
    std::copy(bad.begin(), bad.end(), numbers);
    forward(problem.forward(), on_gpu);
    backward(problem.backward(), on_gpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "second boundary " << bad[1];
  }
}

// What is not a number stays in its sequence, though boxes of the accelerator would reach into the next one's rows.
TEST_F(Cuda, NanStaysInItsSequenceOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const Lengths lengths{65, 100, 30, 256, 70};
  const std::vector<std::int64_t> starts = boundaries(lengths);
  constexpr std::int64_t heads = 2, bad = 2;
  struct Poison {
    double value;
    std::int64_t dqk;
  };
  for (const Poison& poison : {Poison{NAN, 128}, Poison{INFINITY, 128}, Poison{NAN, 256}}) {
    Case c = gpu_case({.batch = 1,
                       .tokens = starts.back(),
                       .qk_heads = heads,
                       .heads = heads,
                       .dqk = poison.dqk,
                       .dhv = 2 * poison.dqk,
                       .dtype = DType::bfloat16});
    c.cu_seqlens = starts;
    Problem problem(c);
    EXPECT_TRUE(plan(problem.backward(), on_gpu).hopper_gradients);
    const Snapshot clean = run_both(problem, on_gpu);
    const auto spoil = [&](const TensorView& view) {
      Values values = gather(view);
      const std::size_t width = values.size() / static_cast<std::size_t>(starts.back());
      std::fill(values.begin() + static_cast<std::ptrdiff_t>(width) * starts[bad],
                values.begin() + static_cast<std::ptrdiff_t>(width) * starts[bad + 1], poison.value);
      overwrite(view, values);
    };
    const MlstmBackward& args = problem.backward();
    for (const TensorView& view : {args.q, args.k, args.v, args.i, args.f, args.dh}) spoil(view);
    const Snapshot dirty = run_both(problem, on_gpu);
    for (const char* name : {"h", "dq", "dk", "dv", "di", "df"}) {
      const std::size_t width = clean.at(name).size() / static_cast<std::size_t>(starts.back());
      for (std::size_t e = 0; e < clean.at(name).size(); ++e) {
        const auto token = static_cast<std::int64_t>(e / width);
        if (token >= starts[bad] && token < starts[bad + 1]) continue;
        ASSERT_EQ(dirty.at(name)[e], clean.at(name)[e]) << name << " of token " << token;
      }
    }
  }
}

// States that forward keeps carry their errors to the end of the sequence: every regime of the gates, more heads than
// multiprocessors have room for at a time, and dhv that takes the kernel with 64 columns to a block.
TEST_F(Cuda, WideHeadsKeepStatesOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const auto check = [&](Regime regime, const MlstmShape& shape) {
    Case c = gpu_case(shape);
    c.regime = regime;
    c.options.keep_states = true;
    Problem problem(c);
    const reference::Judge judge(problem, true);
    EXPECT_FALSE(plan(problem.forward(), on_gpu).keeps_rows) << label(c);
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
                         .dqk = 128,
                         .dhv = 256,
                         .sequences = 8,
                         .longest = 8192,
                         .dtype = DType::bfloat16};
  std::size_t before = std::numeric_limits<std::size_t>::max();
  for (const std::int64_t chunk : {128, 256, 512, 1024, 2048}) {
    const Plan chosen = plan(Operation::backward, shape, {.chunk_size = chunk, .keep_states = true}, on_gpu);
    EXPECT_TRUE(chosen.hopper_gradients);
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
  EXPECT_TRUE(plan(problem.backward(), on_gpu).hopper_gradients);
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

__global__ void fill_small(std::uint16_t* to, std::int64_t count, std::uint32_t seed) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t e = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; e < count; e += stride) {
    std::uint64_t x = (static_cast<std::uint64_t>(e) + seed) * 0x9E3779B97F4A7C15ULL;
    x ^= x >> 29;
    // bfloat16 between 0.5 and 1, either sign.
    to[e] = static_cast<std::uint16_t>(0x3F00U | (x & 0x7FU) | (x & 0x80U) << 8);
  }
}

struct DeviceMemory {
  void* data = nullptr;
  explicit DeviceMemory(std::int64_t bytes) {
    if (cudaMalloc(&data, static_cast<std::size_t>(bytes)) != cudaSuccess) data = nullptr;
    cudaGetLastError();
  }
  ~DeviceMemory() { cudaFree(data); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
};

// v, h, dh and dv have more than 2^31 elements each; the last sequence lies beyond that mark, and must be what the same
// tokens give in small tensors.
TEST_F(Cuda, TensorsBeyondTwoToThe31) {
  constexpr std::int64_t dqk = 16, dhv = 512, last = 300, tokens = (std::int64_t{1} << 31) / dhv + 1000;
  DeviceMemory q(tokens * dqk * 2), k(tokens * dqk * 2), v(tokens * dhv * 2), h(tokens * dhv * 2), dh(tokens * dhv * 2);
  DeviceMemory dq(tokens * dqk * 2), dk(tokens * dqk * 2), dv(tokens * dhv * 2);
  DeviceMemory i(tokens * 2), f(tokens * 2), di(tokens * 2), df(tokens * 2), lengths(3 * 8);
  const std::int64_t bounds[] = {0, tokens - last, tokens};
  for (const DeviceMemory* m : {&q, &k, &v, &h, &dh, &dq, &dk, &dv, &i, &f, &di, &df, &lengths})
    if (m->data == nullptr) GTEST_SKIP() << "tfla: this GPU has not enough memory for the test";
  cudaMemcpy(lengths.data, bounds, sizeof(bounds), cudaMemcpyHostToDevice);
  std::uint32_t seed = 1;
  for (const auto& [memory, width] :
       {std::pair(&q, dqk), {&k, dqk}, {&v, dhv}, {&dh, dhv}, {&i, std::int64_t{1}}, {&f, std::int64_t{1}}})
    fill_small<<<1024, 256>>>(static_cast<std::uint16_t*>(memory->data), tokens * width, seed++);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  // The tokens [begin, begin + count) as tensors of their own.
  const auto rows = [](const DeviceMemory& m, std::int64_t begin, std::int64_t count, std::int64_t width) {
    return MutableTensorView(static_cast<std::uint16_t*>(m.data) + begin * width, DType::bfloat16,
                             {1, count, 1, width});
  };
  const auto gates = [](const DeviceMemory& m, std::int64_t begin, std::int64_t count) {
    return MutableTensorView(static_cast<std::uint16_t*>(m.data) + begin, DType::bfloat16, {1, count, 1});
  };
  const auto run = [&](std::int64_t begin, std::int64_t count, const TensorView& packing, const Execution& execution) {
    forward({.q = rows(q, begin, count, dqk),
             .k = rows(k, begin, count, dqk),
             .v = rows(v, begin, count, dhv),
             .i = gates(i, begin, count),
             .f = gates(f, begin, count),
             .h = rows(h, begin, count, dhv),
             .cu_seqlens = packing},
            execution);
    backward({.q = rows(q, begin, count, dqk),
              .k = rows(k, begin, count, dqk),
              .v = rows(v, begin, count, dhv),
              .i = gates(i, begin, count),
              .f = gates(f, begin, count),
              .dh = rows(dh, begin, count, dhv),
              .dq = rows(dq, begin, count, dqk),
              .dk = rows(dk, begin, count, dqk),
              .dv = rows(dv, begin, count, dhv),
              .di = gates(di, begin, count),
              .df = gates(df, begin, count),
              .cu_seqlens = packing},
             execution);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  const auto results = [&] {
    std::vector<std::vector<std::uint16_t>> all;
    for (const auto& [memory, width] :
         {std::pair(&h, dhv), {&dq, dqk}, {&dk, dqk}, {&dv, dhv}, {&di, std::int64_t{1}}, {&df, std::int64_t{1}}}) {
      all.emplace_back(static_cast<std::size_t>(last * width));
      cudaMemcpy(all.back().data(), static_cast<std::uint16_t*>(memory->data) + (tokens - last) * width,
                 all.back().size() * 2, cudaMemcpyDeviceToHost);
    }
    return all;
  };
  for (const bool portable : {true, false}) {
    const Execution execution{.device = Device::cuda, .portable = portable};
    run(0, tokens, TensorView(lengths.data, DType::int64, {3}), execution);
    const auto beyond = results();
    for (const DeviceMemory* m : {&h, &dv}) cudaMemset(m->data, 0xFF, static_cast<std::size_t>(tokens * dhv * 2));
    run(tokens - last, last, {}, execution);
    EXPECT_EQ(beyond, results()) << (portable ? "portable" : "chosen by the plan");
  }
}

}  // namespace
}  // namespace tfla::test
