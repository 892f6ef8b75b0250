// What must hold of the delta rule whatever the numbers are: chunk sizes, cuts, packing, threads and what lies next to
// a sequence do not change its results.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "tests/delta/problem.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Layout;
using testkit::Tensor;

struct Shape {
  std::int64_t batch, tokens, qk_heads, heads, dqk, dhv, chunk_size;
  std::vector<std::int64_t> cu_seqlens;
};

DeltaCase make_case(const Shape& s, DType dtype, Decay decay = Decay::biased) {
  DeltaCase c;
  c.shape = {.batch = s.batch,
             .tokens = s.tokens,
             .qk_heads = s.qk_heads,
             .heads = s.heads,
             .dqk = s.dqk,
             .dhv = s.dhv,
             .dtype = dtype,
             .gate_dtype = dtype};
  c.g_dtype = dtype;
  c.decay = decay;
  c.cu_seqlens = s.cu_seqlens;
  c.options = {.write = WriteGate::twice_sigmoid, .normalize_qk = true, .chunk_size = s.chunk_size};
  c.initial_state = c.last_state_grad = true;
  return c;
}

TEST(DeltaPropertiesSmall, ChunkSizesDoNotMatter) {
  for (const DeltaRegime regime : {DeltaRegime::ordinary, DeltaRegime::resets, DeltaRegime::one_key_beyond}) {
    for (const DType dtype : {DType::float64, DType::float32}) {
      DeltaCase c = make_case({1, 150, 2, 4, 5, 7, 64, {}}, dtype, Decay::log);
      c.regime = regime;
      DeltaProblem problem(c);
      const DeltaJudge judge(problem);
      const Snapshot expected = run_both(problem);
      for (const std::int64_t chunk_size : {0, 1, 3, 16, 50, 149, 150, 151, 1000}) {
        problem.forward.options.chunk_size = problem.backward.options.chunk_size = chunk_size;
        EXPECT_TRUE(judge.agree(run_both(problem), expected)) << "chunk size " << chunk_size;
      }
    }
  }
}

// ---------------------------------------------------------------- parts of a call

// Tokens [begin, begin + count) of a row of the batch.
template <class Args>
Args part(Args args, std::int64_t batch, std::int64_t begin, std::int64_t count) {
  const auto cut = [&](auto& view) { view = slice(slice(view, 0, batch, 1), 1, begin, count); };
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.beta, &args.g}) cut(*view);
  if constexpr (std::is_same_v<Args, DeltaBackward>) {
    cut(args.dh);
    for (MutableTensorView* view : {&args.dq, &args.dk, &args.dv, &args.dbeta, &args.dg}) cut(*view);
  } else {
    cut(args.h);
  }
  if constexpr (!std::is_same_v<Args, DeltaStep>) args.cu_seqlens = {};
  return args;
}

Snapshot both_snapshots(const DeltaProblem& problem) {
  Snapshot both = snapshot(outputs(problem.forward));
  both.merge(snapshot(outputs(problem.backward)));
  return both;
}

// dA_log and ddt_bias are sums over the calls that a problem is cut into.
void add(Snapshot& sums, const DeltaBackward& args) {
  for (const auto& [name, view] : outputs(args)) {
    if (name != "dA_log" && name != "ddt_bias") continue;
    const Values values = gather(view);
    Values& sum = sums[name];
    sum.resize(values.size());
    for (std::size_t at = 0; at < values.size(); ++at) sum[at] += values[at];
  }
}

// One sequence of the problem on its own, through views of the same memory.
void run_alone(DeltaProblem& problem, std::int64_t sequence, std::int64_t batch, std::int64_t begin, std::int64_t count,
               Snapshot& sums) {
  DeltaForward f = part(problem.forward, batch, begin, count);
  f.initial_state = slice(f.initial_state, 0, sequence, 1);
  f.last_state = slice(f.last_state, 0, sequence, 1);
  delta_forward(f);
  DeltaBackward b = part(problem.backward, batch, begin, count);
  b.initial_state = slice(b.initial_state, 0, sequence, 1);
  b.dlast_state = slice(b.dlast_state, 0, sequence, 1);
  b.dinitial_state = slice(b.dinitial_state, 0, sequence, 1);
  delta_backward(b);
  add(sums, b);
}

TEST(DeltaPropertiesSmall, CutAnywhereAndResumedEqualsTheWhole) {
  constexpr std::int64_t T = 101;
  for (const Decay decay : {Decay::none, Decay::log, Decay::biased}) {
    for (const std::int64_t chunk_size : {0, 16}) {
      const DeltaCase c = make_case({1, T, 2, 4, 5, 7, chunk_size, {}}, DType::float64, decay);
      DeltaProblem problem(c);
      const DeltaJudge judge(problem);
      const Snapshot whole = run_both(problem);
      const Tensor C(DType::float64, {1, 4, 5, 7}), dC(DType::float64, {1, 4, 5, 7});
      for (const std::int64_t cut : {0, 1, 2, 17, 64, 100, 101}) {
        problem.poison();
        DeltaForward first = part(problem.forward, 0, 0, cut);
        first.last_state = C.view;
        delta_forward(first);
        DeltaForward second = part(problem.forward, 0, cut, T - cut);
        second.initial_state = C.view;
        delta_forward(second);
        Snapshot sums;
        DeltaBackward later = part(problem.backward, 0, cut, T - cut);
        later.initial_state = C.view;
        later.dinitial_state = dC.view;
        delta_backward(later);
        add(sums, later);
        DeltaBackward earlier = part(problem.backward, 0, 0, cut);
        earlier.dlast_state = dC.view;
        delta_backward(earlier);
        add(sums, earlier);
        Snapshot pieces = both_snapshots(problem);
        for (const auto& [name, values] : sums) pieces[name] = values;
        EXPECT_TRUE(judge.agree(pieces, whole)) << "cut at " << cut;
      }
    }
  }
}

TEST(DeltaPropertiesSmall, PackedEqualsSeparate) {
  const std::vector<std::int64_t> boundaries{0, 0, 5, 6, 40, 40, 101};
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    for (const Decay decay : {Decay::none, Decay::log, Decay::biased}) {
      DeltaProblem problem(make_case({1, 101, 2, 4, 5, 7, 16, boundaries}, dtype, decay));
      const DeltaJudge judge(problem);
      Snapshot packed = run_both(problem), sums;
      problem.poison();
      for (std::size_t s = 0; s + 1 < boundaries.size(); ++s) {
        run_alone(problem, static_cast<std::int64_t>(s), 0, boundaries[s], boundaries[s + 1] - boundaries[s], sums);
      }
      Snapshot alone = both_snapshots(problem);
      // Sums over sequences that are rounded to bfloat16 one by one are as good as six roundings.
      for (const auto& [name, values] : sums) {
        alone.erase(name);
        EXPECT_TRUE(close(values, packed.at(name), dtype == DType::bfloat16 ? 6 * 0x1p-8 : 1e-4)) << name;
        packed.erase(name);
      }
      EXPECT_TRUE(same_bits(alone, packed)) << label(problem.description);
    }
  }
}

TEST(DeltaPropertiesSmall, BatchEqualsItsRowsAndItsPackingBitForBit) {
  const DeltaCase c = make_case({3, 37, 2, 4, 5, 7, 16, {}}, DType::float32);
  DeltaProblem problem(c);
  const Snapshot batch = run_both(problem);
  DeltaCase as_packed = c;
  as_packed.shape.batch = 1;
  as_packed.shape.tokens = 3 * 37;
  as_packed.cu_seqlens = {0, 37, 74, 111};
  DeltaProblem packed(as_packed);  // the same draws: element for element the same memory
  EXPECT_TRUE(same_bits(run_both(packed), batch));
  problem.poison();
  Snapshot sums, rows = batch;
  for (std::int64_t b = 0; b < 3; ++b) run_alone(problem, b, b, 0, 37, sums);
  Snapshot alone = both_snapshots(problem);
  for (const auto& [name, values] : sums) {
    EXPECT_TRUE(close(values, rows.at(name), 1e-4)) << name;
    rows.erase(name);
    alone.erase(name);
  }
  EXPECT_TRUE(same_bits(alone, rows));
}

TEST(DeltaPropertiesSmall, BoundariesMayBeInt32OrAColumnOfATable) {
  DeltaProblem problem(make_case({1, 50, 2, 4, 5, 7, 0, {0, 20, 20, 50}}, DType::float32));
  const Snapshot wide = run_both(problem);
  const std::int32_t narrow[] = {0, 20, 20, 50};
  problem.forward.cu_seqlens = problem.backward.cu_seqlens = TensorView(narrow, DType::int32, {4});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
  const std::int64_t table[] = {0, 7, 20, 7, 20, 7, 50, 7};
  problem.forward.cu_seqlens = problem.backward.cu_seqlens = TensorView(table, DType::int64, {4}, {2});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
}

TEST(DeltaPropertiesSmall, LayoutsAndTheLastStateInPlaceOfTheFirstDoNotMatter) {
  const DeltaCase c = make_case({2, 75, 2, 4, 5, 7, 16, {}}, DType::float32);
  DeltaProblem plain(c);
  const Snapshot expected = run_both(plain);
  for (const Layout layout : {Layout::bhtd, Layout::fused}) {
    for (const bool in_place : {false, true}) {
      DeltaCase other = c;
      other.layout = layout;
      other.in_place = in_place;
      DeltaProblem problem(other);
      EXPECT_TRUE(same_bits(run_both(problem), expected)) << label(other);
    }
  }
}

TEST(DeltaPropertiesSmall, WhatIsNotAskedForDoesNotMatter) {
  DeltaProblem problem(make_case({2, 75, 2, 4, 5, 7, 16, {}}, DType::float32));
  Snapshot expected = run_both(problem);
  problem.forward.last_state = {};
  problem.backward.dinitial_state = {};
  expected.erase("C");
  expected.erase("dC0");
  EXPECT_TRUE(same_bits(run_both(problem), expected));
}

// ---------------------------------------------------------------- the same bits

const Shape shapes[] = {{1, 300, 1, 1, 8, 12, 16, {}},
                        {1, 200, 1, 3, 5, 7, 0, {}},
                        {3, 40, 2, 4, 8, 8, 16, {}},
                        {2, 1, 1, 2, 16, 3, 0, {}},
                        {1, 260, 1, 2, 4, 9, 16, {0, 3, 3, 4, 200, 250}},
                        {1, 150, 1, 1, 4, 131, 16, {}},
                        {1, 90, 1, 4, 20, 200, 0, {}}};

TEST(DeltaDeterminismSmall, ThreadsAndRunsDoNotMatter) {
  for (const Shape& shape : shapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
      DeltaProblem problem(make_case(shape, dtype));
      const Snapshot expected = run_both(problem);
      for (const int threads : {1, 2, 3, 8}) {
        problem.description.threads = threads;
        EXPECT_TRUE(same_bits(run_both(problem), expected)) << label(problem.description);
      }
    }
  }
}

TEST(DeltaDeterminismSmall, DirtyScratchAndAReusedPlanDoNotMatter) {
  for (const Shape& shape : shapes) {
    DeltaProblem problem(make_case(shape, DType::float32));
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
      DeltaProblem problem(make_case({1, 75, 2, 4, 5, 9, chunk_size, boundaries}, dtype));
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
  DeltaProblem problem(make_case({2, 40, 2, 4, 5, 9, 16, {}}, DType::float32));
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
  DeltaProblem problem(make_case({1, 75, 2, 4, 5, 9, 16, {0, 21, 50}}, DType::float32));
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

// ---------------------------------------------------------------- step

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
  return make_case({s.batch, s.tokens, s.qk_heads, s.heads, s.dqk, s.dhv, 0, {}}, dtype);
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
