// What must hold of the delta rule whatever the numbers are: chunk sizes, cuts, packing and layouts do not change its
// results.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/delta/parts.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Layout;
using testkit::Tensor;

TEST(DeltaPropertiesSmall, ChunkSizesDoNotMatter) {
  for (const DeltaRegime regime : {DeltaRegime::ordinary, DeltaRegime::resets, DeltaRegime::one_key_beyond}) {
    for (const DType dtype : {DType::float64, DType::float32}) {
      DeltaCase c = delta_case({1, 150, 2, 4, 5, 7, 64, {}}, dtype, Decay::log);
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
      const DeltaCase c = delta_case({1, T, 2, 4, 5, 7, chunk_size, {}}, DType::float64, decay);
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
      DeltaProblem problem(delta_case({1, 101, 2, 4, 5, 7, 16, boundaries}, dtype, decay));
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
  const DeltaCase c = delta_case({3, 37, 2, 4, 5, 7, 16, {}}, DType::float32);
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
  DeltaProblem problem(delta_case({1, 50, 2, 4, 5, 7, 0, {0, 20, 20, 50}}, DType::float32));
  const Snapshot wide = run_both(problem);
  const std::int32_t narrow[] = {0, 20, 20, 50};
  problem.forward.cu_seqlens = problem.backward.cu_seqlens = TensorView(narrow, DType::int32, {4});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
  const std::int64_t table[] = {0, 7, 20, 7, 20, 7, 50, 7};
  problem.forward.cu_seqlens = problem.backward.cu_seqlens = TensorView(table, DType::int64, {4}, {2});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
}

TEST(DeltaPropertiesSmall, LayoutsAndTheLastStateInPlaceOfTheFirstDoNotMatter) {
  const DeltaCase c = delta_case({2, 75, 2, 4, 5, 7, 16, {}}, DType::float32);
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

// Beyond what decays a state to nothing, a gate may be infinite.
TEST(DeltaPropertiesSmall, AnInfiniteGateIsAReset) {
  DeltaCase c;
  c.shape = {.tokens = 40, .qk_heads = 1, .heads = 2, .dqk = 3, .dhv = 2};
  c.decay = Decay::biased;
  Snapshot results[2];
  for (const bool infinite : {false, true}) {
    DeltaProblem problem(c);
    overwrite(slice(problem.forward.g, 1, 20, 1), Values(2, infinite ? std::numeric_limits<double>::infinity() : 1e6));
    results[infinite ? 1 : 0] = run_both(problem);
  }
  EXPECT_TRUE(same_bits(results[1], results[0]));
  for (const double x : results[1].at("dA_log")) EXPECT_TRUE(std::isfinite(x));
}

TEST(DeltaPropertiesSmall, WhatIsNotAskedForDoesNotMatter) {
  DeltaProblem problem(delta_case({2, 75, 2, 4, 5, 7, 16, {}}, DType::float32));
  Snapshot expected = run_both(problem);
  problem.forward.last_state = {};
  problem.backward.dinitial_state = {};
  expected.erase("C");
  expected.erase("dC0");
  EXPECT_TRUE(same_bits(run_both(problem), expected));
}

}  // namespace
}  // namespace tfla::test
