// Packed sequences on the kernels of Hopper.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cuda/sm90/entry.h"
#include "testkit/tensor.h"
#include "tests/cuda/on_gpu.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::Regime;
using testkit::Case;
using testkit::gather;
using testkit::Layout;
using testkit::Problem;

using Lengths = std::vector<std::int64_t>;

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
    // Narrow heads, with more items and tiles than blocks.
    {mixed, 3, 3, 32, 32, Layout::bthd, InputGate::exponential, true},
    {mixed, 2, 2, 64, 64, Layout::fused, InputGate::sigmoid, true},
    {mixed, 2, 2, 24, 40, Layout::bhtd},
    {repeated({0, 200, 3}, 45), 12, 12, 32, 32, Layout::bthd, InputGate::exponential, true},
    {repeated({0, 200, 3}, 45), 12, 12, 64, 64},
    // Wide heads.
    {mixed, 1, 1, 256, 128, Layout::fused, InputGate::exponential, true},
    {mixed, 2, 2, 256, 512, Layout::bthd, InputGate::exponential, true},
    {mixed, 3, 3, 200, 264, Layout::bhtd, InputGate::sigmoid, true},
    {mixed, 2, 2, 64, 320, Layout::bthd, InputGate::sigmoid},
    {mixed, 2, 2, 128, 264, Layout::bhtd, InputGate::exponential, true},
    {mixed, 2, 2, 136, 40, Layout::bthd, InputGate::exponential, true},
    {{1}, 2, 2, 136, 8},
    {{127, 129, 1, 1, 1, 511}, 9, 9, 256, 264},
    // Longer chunks: slices of the heads.
    {mixed, 5, 5, 128, 256, Layout::bthd, InputGate::exponential, true, 256},
    {mixed, 7, 7, 64, 96, Layout::fused, InputGate::sigmoid, true, 512},
    {mixed, 3, 3, 256, 512, Layout::bhtd, InputGate::exponential, true, 1024},
    {mixed, 2, 4, 64, 64, Layout::bthd, InputGate::exponential, true, 256},
    // More tiles of wide heads than multiprocessors, of which a third are of numbers that no chunk has.
    {repeated({0, 200, 3}, 15), 2, 2, 136, 264, Layout::bthd, InputGate::exponential, true},
};

Case packed_case(const Lengths& lengths, std::int64_t qk_heads, std::int64_t heads, std::int64_t dqk, std::int64_t dhv,
                 DType dtype) {
  Case c = gpu_case({.batch = 1,
                     .tokens = boundaries(lengths).back(),
                     .qk_heads = qk_heads,
                     .heads = heads,
                     .dqk = dqk,
                     .dhv = dhv,
                     .dtype = dtype});
  c.cu_seqlens = boundaries(lengths);
  return c;
}

// float16 has no room for the kernel of tall and narrow states.
bool has_kernels(const PackedShape& shape, DType dtype) {
  return dtype == DType::bfloat16 || shape.dqk <= 128 || shape.dhv > 64;
}

// float16: shorter sequences, so that the reference takes less time, but for those that are long for the sake of
// segments.
Lengths lengths_of(const PackedShape& shape, DType dtype) {
  constexpr std::int64_t longest = 200, long_enough = 2000;
  Lengths lengths = shape.lengths;
  if (dtype == DType::float16)
    for (std::int64_t& length : lengths)
      if (length < long_enough) length = std::min(length, longest);
  return lengths;
}

Case case_of(const PackedShape& shape, DType dtype) {
  Case c = packed_case(lengths_of(shape, dtype), shape.qk_heads, shape.heads, shape.dqk, shape.dhv, dtype);
  c.layout = shape.layout;
  c.options = {.gate = shape.gate, .chunk_size = shape.chunk};
  c.initial_state = c.last_state = c.last_state_grad = shape.states;
  return c;
}

void check_packed_shapes(DType dtype) {
  bool keep = false;
  for (const PackedShape& shape : packed_shapes) {
    keep = !keep;
    Case c = case_of(shape, dtype);
    c.options.keep = keep ? Keep::states : Keep::nothing;
    if (!has_kernels(shape, dtype)) {
      EXPECT_FALSE(runs_on_hopper(plan(Problem(c).forward(), on_gpu))) << label(c);
      continue;
    }
    check_on_hopper(c);
  }
}

TEST_F(Cuda, PackedOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  check_packed_shapes(DType::bfloat16);
}

TEST_F(Cuda, PackedFloat16OnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  check_packed_shapes(DType::float16);
}

// Lifts of every kernel: all regimes of the gates, for heads that take `gradients` and for wide ones, whose states are
// of several tiles.
TEST_F(Cuda, PackedFloat16InEveryRegimeOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  constexpr InputGate gates[] = {InputGate::exponential, InputGate::sigmoid, InputGate::log};
  std::size_t number = 0;
  for (const Regime regime : reference::all_regimes)
    for (const auto& [dqk, dhv] : {std::pair<std::int64_t, std::int64_t>{128, 256}, {136, 264}}) {
      Case c = packed_case({0, 300, 1, 0, 129, 64}, 2, 2, dqk, dhv, DType::float16);
      c.regime = regime;
      c.options.gate = gates[number++ % std::size(gates)];
      c.initial_state = c.last_state_grad = number % 2 == 0;
      check_on_hopper(c);
    }
}

// As Float16RangesOnHopper. One sequence is long enough for segments, whose states are summed up in float32.
TEST_F(Cuda, PackedFloat16RangesOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  struct Range {
    double k, v, dh;
    Lengths lengths;
    std::int64_t dqk, dhv;
  };
  const auto change = [](const TensorView& view, double factor) {
    Values values = gather(view);
    for (double& x : values) x *= factor;
    overwrite(view, values);
  };
  const Lengths shorter{0, 150, 1, 65}, longer{1, 2000, 0, 100};
  for (const Range& range : {Range{1e-3, 1e-3, 1000, shorter, 128, 256},
                             {1e-3, 1e-3, 1000, shorter, 256, 512},
                             {1e-3, 1e-3, 1000, longer, 136, 264},
                             {100, 100, 0.01, shorter, 128, 256},
                             {100, 100, 0.01, shorter, 256, 512},
                             {100, 100, 0.01, longer, 64, 72},
                             {100, 100, 0.01, longer, 136, 264}}) {
    Case c = packed_case(range.lengths, 2, 2, range.dqk, range.dhv, DType::float16);
    c.regime = Regime::randn;
    SCOPED_TRACE(testing::Message() << "k " << range.k << " v " << range.v);
    const Plan chosen = check_on_hopper(c, [&](Problem& problem) {
      const MlstmBackward& args = problem.backward();
      change(args.k, range.k);
      change(args.v, range.v);
      change(args.dh, range.dh);
    });
    if (range.lengths == longer) {
      EXPECT_GT(chosen.segments, 1) << label(c);
    }
  }
}

void check_packed_norm_gradients(DType dtype) {
  bool exact = false;
  for (const PackedShape& shape : packed_shapes) {
    exact = !exact;
    if (shape.qk_heads != shape.heads || (!exact && !shape.states) || !has_kernels(shape, dtype)) continue;
    if (exact && boundaries(shape.lengths).back() == 1) continue;  // the gradient is the difference of large numbers
    Case c = case_of(shape, dtype);
    if (exact) c.regime = Regime::randn;  // trained_like has rows whose q.n cancels: bad for any kernels
    c.options.normalizer = Normalizer::max;
    c.options.exact_normalizer_grad = exact;
    c.options.keep = shape.states ? Keep::states : Keep::nothing;
    check_on_hopper(c, {}, true);
  }
}

TEST_F(Cuda, PackedNormGradientsOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  check_packed_norm_gradients(DType::bfloat16);
}

TEST_F(Cuda, PackedFloat16NormGradientsOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  check_packed_norm_gradients(DType::float16);
}

// The same bits every time. With many short sequences the warps of a block go from one to the next at very different
// times, and those that come late must not miss the others.
TEST_F(Cuda, PackedRepeatsOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    Problem problem(packed_case(repeated({0, 200, 3}, 45), 12, 12, 64, 64, dtype));
    forward(problem.forward(), on_gpu);
    const Values h = gather(problem.forward().h);
    for (int call = 0; call < 500; ++call) forward(problem.forward(), on_gpu);
    EXPECT_EQ(gather(problem.forward().h), h) << "dtype " << static_cast<int>(dtype);
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
// With states there are no runs of them, whose chunks begin elsewhere.
TEST_F(Cuda, PackedEqualsSeparateOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const Lengths lengths{1, 63, 0, 64, 65, 128, 200, 127, 129, 500};
  const std::vector<std::int64_t> starts = boundaries(lengths);
  struct Row {
    std::int64_t dqk, dhv;
    DType dtype = DType::bfloat16;
  };
  for (const auto& [dqk, dhv, dtype] : {Row{64, 128},
                                        {128, 256},
                                        {128, 264},
                                        {256, 512},
                                        {64, 128, DType::float16},
                                        {128, 256, DType::float16},
                                        {128, 264, DType::float16},
                                        {256, 512, DType::float16}}) {
    Case c = packed_case(lengths, 3, 3, dqk, dhv, dtype);
    c.initial_state = true;
    Problem problem(c);
    EXPECT_TRUE(has_hopper_gradients(plan(problem.backward(), on_gpu)));
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
      const auto states = [&](auto&... views) { (state(views), ...); };
      states(first.initial_state.C, first.initial_state.n, first.initial_state.m);
      states(second.initial_state.C, second.initial_state.n, second.initial_state.m);
      states(second.dinitial_state.C, second.dinitial_state.n);
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
  struct Row {
    std::int64_t dhv;
    DType dtype;
  };
  for (const auto& [dhv, dtype] :
       {Row{96, DType::bfloat16}, {264, DType::bfloat16}, {96, DType::float16}, {264, DType::float16}}) {
    Case c = packed_case({300, 300, 600}, 1, 1, 64, dhv, dtype);
    c.initial_state = true;
    c.options.keep = Keep::states;
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
}

// What is not a number stays in its sequence, though boxes of the accelerator would reach into the next one's rows.
// With states there are no runs, which share it.
TEST_F(Cuda, NanStaysInItsSequenceOnHopper) {
  if (!cuda::sm90::supported_device()) GTEST_SKIP() << "tfla: this GPU is not a Hopper";
  const Lengths lengths{65, 100, 30, 256, 70};
  const std::vector<std::int64_t> starts = boundaries(lengths);
  constexpr std::int64_t heads = 2, bad = 2;
  struct Poison {
    double value;
    std::int64_t dqk;
    DType dtype = DType::bfloat16;
  };
  for (const Poison& poison :
       {Poison{NAN, 128}, {INFINITY, 128}, {NAN, 256}, {NAN, 128, DType::float16}, {INFINITY, 256, DType::float16}}) {
    Case c = packed_case(lengths, heads, heads, poison.dqk, 2 * poison.dqk, poison.dtype);
    c.initial_state = true;
    Problem problem(c);
    EXPECT_TRUE(has_hopper_gradients(plan(problem.backward(), on_gpu)));
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

}  // namespace
}  // namespace tfla::test
