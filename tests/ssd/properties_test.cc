// What must hold of the state space dual whatever the numbers are: chunk sizes, cuts, packing and layouts do not change
// its results.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/ssd/parts.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Layout;
using testkit::Numbers;
using testkit::Tensor;

TEST(SsdPropertiesSmall, ChunkSizesDoNotMatter) {
  for (const SsdRegime regime : {SsdRegime::ordinary, SsdRegime::resets, SsdRegime::brief}) {
    for (const DType dtype : {DType::float64, DType::float32}) {
      SsdCase c = ssd_case({1, 150, 2, 4, 5, 7, 64, {}}, dtype);
      c.regime = regime;
      c.seq_idx = Numbers::int64;
      SsdProblem problem(c);
      const SsdJudge judge(problem);
      const Snapshot expected = run_both(problem);
      for (const std::int64_t chunk_size : {0, 1, 3, 16, 50, 149, 150, 151, 1000}) {
        problem.forward.options.chunk_size = problem.backward.options.chunk_size = chunk_size;
        EXPECT_TRUE(judge.agree(run_both(problem), expected)) << "chunk size " << chunk_size;
      }
    }
  }
}

// ---------------------------------------------------------------- parts of a call

Snapshot both_snapshots(const SsdProblem& problem) {
  Snapshot both = snapshot(outputs(problem.forward));
  both.merge(snapshot(outputs(problem.backward)));
  return both;
}

// dA, dD and ddt_bias are sums over the calls that a problem is cut into.
void add(Snapshot& sums, const SsdBackward& args) {
  for (const auto& [name, view] : outputs(args)) {
    if (name != "dA" && name != "dD" && name != "ddt_bias") continue;
    const Values values = gather(view);
    Values& sum = sums[name];
    sum.resize(values.size());
    for (std::size_t at = 0; at < values.size(); ++at) sum[at] += values[at];
  }
}

// One sequence of the problem on its own, through views of the same memory.
void run_alone(SsdProblem& problem, std::int64_t sequence, std::int64_t batch, std::int64_t begin, std::int64_t count,
               Snapshot& sums) {
  SsdForward f = part(problem.forward, batch, begin, count);
  f.initial_state = slice(f.initial_state, 0, sequence, 1);
  f.last_state = slice(f.last_state, 0, sequence, 1);
  ssd_forward(f);
  SsdBackward b = part(problem.backward, batch, begin, count);
  b.initial_state = slice(b.initial_state, 0, sequence, 1);
  b.dlast_state = slice(b.dlast_state, 0, sequence, 1);
  b.dinitial_state = slice(b.dinitial_state, 0, sequence, 1);
  ssd_backward(b);
  add(sums, b);
}

void poison(SsdProblem& problem) {
  problem.poison_forward();
  problem.poison_backward();
}

TEST(SsdPropertiesSmall, CutAnywhereAndResumedEqualsTheWhole) {
  constexpr std::int64_t T = 101;
  for (const std::int64_t chunk_size : {0, 16}) {
    SsdProblem problem(ssd_case({1, T, 2, 4, 5, 7, chunk_size, {}}, DType::float64));
    const SsdJudge judge(problem);
    const Snapshot whole = run_both(problem);
    const Tensor S(DType::float64, {1, 4, 5, 7}), dS(DType::float64, {1, 4, 5, 7});
    for (const std::int64_t cut : {0, 1, 2, 17, 64, 100, 101}) {
      poison(problem);
      SsdForward first = part(problem.forward, 0, 0, cut);
      first.last_state = S.view;
      ssd_forward(first);
      SsdForward second = part(problem.forward, 0, cut, T - cut);
      second.initial_state = S.view;
      ssd_forward(second);
      Snapshot sums;
      SsdBackward later = part(problem.backward, 0, cut, T - cut);
      later.initial_state = S.view;
      later.dinitial_state = dS.view;
      ssd_backward(later);
      add(sums, later);
      SsdBackward earlier = part(problem.backward, 0, 0, cut);
      earlier.dlast_state = dS.view;
      ssd_backward(earlier);
      add(sums, earlier);
      Snapshot pieces = both_snapshots(problem);
      for (const auto& [name, values] : sums) pieces[name] = values;
      EXPECT_TRUE(judge.agree(pieces, whole)) << "cut at " << cut;
    }
  }
}

TEST(SsdPropertiesSmall, PackedEqualsSeparate) {
  const std::vector<std::int64_t> boundaries{0, 0, 5, 6, 40, 40, 101};
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    SsdProblem problem(ssd_case({1, 101, 2, 4, 5, 7, 16, boundaries}, dtype));
    Snapshot packed = run_both(problem), sums;
    poison(problem);
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

TEST(SsdPropertiesSmall, BatchEqualsItsRowsAndItsPackingBitForBit) {
  const SsdCase c = ssd_case({3, 37, 2, 4, 5, 7, 16, {}}, DType::float32);
  SsdProblem problem(c);
  const Snapshot batch = run_both(problem);
  SsdCase as_packed = c;
  as_packed.shape.batch = 1;
  as_packed.shape.tokens = 3 * 37;
  as_packed.cu_seqlens = {0, 37, 74, 111};
  SsdProblem packed(as_packed);
  for (const auto& [from, to] : {std::pair(problem.forward.dt, packed.forward.dt)})
    overwrite(to, gather(from));  // drawn by the token of a row; all else is drawn by its place
  EXPECT_TRUE(same_bits(run_both(packed), batch));
  poison(problem);
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

// ---------------------------------------------------------------- numbers of sequences

// Sequences told apart by numbers, in one row, and by boundaries, each from a state of zeros.
TEST(SsdPropertiesSmall, NumbersEqualBoundaries) {
  constexpr std::int64_t T = 90;
  const std::vector<std::int64_t> boundaries{0, 16, 17, 50, 90};
  for (const DType dtype : {DType::float64, DType::float32}) {
    SsdCase c = ssd_case({1, T, 2, 4, 5, 7, 16, boundaries}, dtype);
    c.initial_state = c.last_state_grad = false;
    SsdProblem packed(c);
    c.cu_seqlens = {};
    c.seq_idx = Numbers::int32;
    SsdProblem numbered(c);
    std::vector<std::int32_t> numbers(T);
    for (std::int64_t t = 0; t < T; ++t)
      numbers[static_cast<std::size_t>(t)] = t < 16 ? 0 : t < 17 ? -3 : t < 50 ? 7 : 0;
    std::copy(numbers.begin(), numbers.end(),
              static_cast<std::int32_t*>(const_cast<void*>(numbered.forward.seq_idx.data)));
    const SsdJudge judge(numbered);
    Snapshot expected = run_both(packed), found = run_both(numbered);
    const Values last = expected.at("S"), state = found.at("S");
    EXPECT_TRUE(
        close(state, Values(last.end() - std::ssize(state), last.end()), dtype == DType::float64 ? 1e-10 : 2e-5));
    expected.erase("S");
    EXPECT_TRUE(judge.agree(found, expected));
  }
}

// Before the first token of a row the number is 0, wherever a sequence begins; inside the row it is that of the token
// before, though it belong to another sequence.
TEST(SsdPropertiesSmall, ABoundaryIsNoReset) {
  SsdCase c = ssd_case({1, 6, 1, 1, 2, 3, 0, {0, 3, 6}}, DType::float64);
  c.seq_idx = Numbers::int64;
  SsdProblem problem(c);
  auto* numbers = static_cast<std::int64_t*>(const_cast<void*>(problem.forward.seq_idx.data));
  const auto states_read = [&] {
    const Snapshot before = run_both(problem);
    return std::vector<bool>{before.at("dS0")[0] != 0, before.at("dS0")[6] != 0};
  };
  std::fill_n(numbers, 6, 0);
  EXPECT_EQ(states_read(), (std::vector<bool>{true, true}));
  std::fill_n(numbers, 6, 5);
  EXPECT_EQ(states_read(), (std::vector<bool>{false, true}));
  std::fill_n(numbers, 3, 0);
  EXPECT_EQ(states_read(), (std::vector<bool>{true, false}));
}

// ---------------------------------------------------------------- views

TEST(SsdPropertiesSmall, BoundariesMayBeInt32OrAColumnOfATable) {
  SsdProblem problem(ssd_case({1, 50, 2, 4, 5, 7, 0, {0, 20, 20, 50}}, DType::float32));
  const Snapshot wide = run_both(problem);
  const std::int32_t narrow[] = {0, 20, 20, 50};
  problem.forward.cu_seqlens = problem.backward.cu_seqlens = TensorView(narrow, DType::int32, {4});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
  const std::int64_t table[] = {0, 7, 20, 7, 20, 7, 50, 7};
  problem.forward.cu_seqlens = problem.backward.cu_seqlens = TensorView(table, DType::int64, {4}, {2});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
}

TEST(SsdPropertiesSmall, LayoutsOfTensorsAndStatesDoNotMatter) {
  SsdCase c = ssd_case({2, 75, 2, 4, 5, 7, 16, {}}, DType::float32);
  c.seq_idx = Numbers::int32;
  SsdProblem plain(c);
  const Snapshot expected = run_both(plain);
  for (const Layout layout : {Layout::bthd, Layout::bhtd, Layout::fused}) {
    for (const bool in_place : {false, true}) {
      for (const bool turned : {false, true}) {
        SsdCase other = c;
        other.layout = layout;
        other.in_place = in_place;
        other.turned_states = turned;
        SsdProblem problem(other);
        EXPECT_TRUE(same_bits(run_both(problem), expected)) << label(other);
      }
    }
  }
}

TEST(SsdPropertiesSmall, OneNumberOfDPerHeadIsThatNumberInEveryChannel) {
  SsdCase c = ssd_case({1, 40, 1, 2, 3, 4, 16, {}}, DType::float64);
  SsdProblem channels(c);
  c.skip = Skip::per_head;
  SsdProblem heads(c);
  const Values D = gather(heads.forward.D);
  overwrite(channels.forward.D, {D[0], D[0], D[0], D[1], D[1], D[1]});
  Snapshot expected = run_both(heads), found = run_both(channels);
  const Values wide = found.at("dD");
  EXPECT_TRUE(close({wide[0] + wide[1] + wide[2], wide[3] + wide[4] + wide[5]}, expected.at("dD"), 1e-12));
  found.erase("dD");
  expected.erase("dD");
  EXPECT_TRUE(same_bits(found, expected));
}

TEST(SsdPropertiesSmall, WhatIsNotAskedForDoesNotMatter) {
  SsdProblem problem(ssd_case({2, 75, 2, 4, 5, 7, 16, {}}, DType::float32));
  Snapshot expected = run_both(problem);
  const MutableTensorView kept = problem.forward.ungated;
  problem.forward.last_state = {};
  problem.backward.dinitial_state = {};
  expected.erase("S");
  expected.erase("dS0");
  EXPECT_TRUE(same_bits(run_both(problem), expected));
  problem.forward.ungated = {};
  const Values y = expected.at("y");
  EXPECT_TRUE(same_bits(run_forward(problem), {{"y", y}}));
  EXPECT_TRUE(kept.given());
}

// Outputs before the gate are those of the same call without one.
TEST(SsdPropertiesSmall, UngatedIsWhatThereIsWithoutAGate) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    SsdProblem problem(ssd_case({2, 75, 2, 4, 5, 7, 16, {}}, dtype));
    const Snapshot gated = run_forward(problem);
    problem.forward.z = {};
    problem.forward.ungated = {};
    EXPECT_TRUE(same_bits(run_forward(problem).at("y"), gated.at("ungated")));
  }
}

}  // namespace
}  // namespace tfla::test
