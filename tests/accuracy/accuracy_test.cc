// Errors against the float64 reference: regimes x variants x dtypes x chunk sizes x odd shapes x formulations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/pairwise.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::Regime;
using testkit::Case;
using testkit::Layout;

struct Variant {
  InputGate gate;
  Normalizer normalizer;
};
constexpr Variant variants[] = {{InputGate::exponential, Normalizer::max},
                                {InputGate::sigmoid, Normalizer::none},
                                {InputGate::sigmoid, Normalizer::max},
                                {InputGate::exponential, Normalizer::none},
                                {InputGate::log, Normalizer::none}};

struct DTypes {
  DType dtype, gate_dtype;
};
constexpr DTypes dtypes[] = {{DType::float32, DType::float32},   {DType::float64, DType::float64},
                             {DType::bfloat16, DType::float32},  {DType::float16, DType::float32},
                             {DType::bfloat16, DType::bfloat16}, {DType::float16, DType::float16},
                             {DType::float32, DType::bfloat16},  {DType::float64, DType::float32}};

// padded: tokens behind the last sequence, and boundaries that are a column of a table. single: the same with one
// sequence.
enum class Packing : std::uint8_t { none, whole, padded, single };

struct Heads {
  std::int64_t batch, heads, qk_heads;
  Packing packing;
};

// The values of every factor. Two tables are drawn from it: a full one, and one small enough for sanitizers.
struct Factors {
  std::vector<std::int64_t> chunk_sizes, tokens, dqk, dhv;
  std::vector<Heads> heads;
};
const Factors full{.chunk_sizes = {64, 0, 16, 100, 7, 256, 1, 2048},
                   .tokens = {200, 65, 1000, 1, 64, 63, 2, 0},
                   .dqk = {64, 3, 128, 24, 96, 8, 256, 1},
                   .dhv = {96, 8, 256, 1, 128, 3, 64, 24},
                   .heads = {{2, 2, 2, Packing::none},
                             {1, 4, 2, Packing::none},
                             {1, 3, 1, Packing::whole},
                             {3, 2, 1, Packing::none},
                             {1, 2, 2, Packing::padded},
                             {1, 2, 1, Packing::single}}};
const Factors few{
    .chunk_sizes = {16, 0, 7, 1, 64},
    .tokens = {65, 40, 1, 2, 0},
    .dqk = {8, 3, 24, 1},
    .dhv = {24, 1, 8, 3},
    .heads = {
        {2, 2, 2, Packing::none}, {1, 4, 2, Packing::none}, {1, 3, 1, Packing::padded}, {1, 2, 2, Packing::single}}};

// Packed sequences of uneven lengths, among them an empty one and, where there is room, one of one token.
std::vector<std::int64_t> boundaries(std::int64_t tokens, Packing packing) {
  const std::int64_t third = tokens / 3, end = packing == Packing::whole ? tokens : tokens - tokens / 5;
  if (packing == Packing::single) return {0, end};
  return {0, third, third, std::min(third + 1, end), end};
}

enum Factor : std::size_t {
  regime,
  variant,
  dtype,
  formulation,
  chunk,
  tokens,
  dqk,
  dhv,
  heads,
  layout,
  state,
  grad,
  exact,
  cap,
  factors
};

std::vector<int> levels(const Factors& f) {
  const auto size = [](const auto& x) { return static_cast<int>(std::size(x)); };
  std::vector<int> count(factors, 2);
  count[regime] = size(reference::all_regimes);
  count[variant] = size(variants);
  count[dtype] = size(dtypes);
  count[formulation] = 3;
  count[chunk] = size(f.chunk_sizes);
  count[tokens] = size(f.tokens);
  count[dqk] = size(f.dqk);
  count[dhv] = size(f.dhv);
  count[heads] = size(f.heads);
  count[layout] = 3;
  count[state] = 3;
  return count;
}

template <class Range>
auto pick(const Range& values, int index) {
  return *(std::begin(values) + index);
}

// Two kinds of rows are left out. Backward stores a state of dqk x dhv per chunk: no more than half a gigabyte of them.
// And with one or two tokens h hardly depends on q and k when their product is in the denominator too: the exact
// gradient is then the small difference of large numbers, and its relative error says nothing.
bool sensible(const Factors& f, const Row& row) {
  const auto is_set = [&](Factor factor) { return row[factor] != unset; };
  if (is_set(exact) && is_set(variant) && is_set(tokens) && row[exact] == 1 &&
      variants[row[variant]].normalizer == Normalizer::max && pick(f.tokens, row[tokens]) <= 2) {
    return false;
  }
  for (const Factor factor : {chunk, tokens, dqk, dhv, heads}) {
    if (row[factor] == unset) return true;
  }
  const std::int64_t length = std::max<std::int64_t>(1, pick(f.chunk_sizes, row[chunk]));
  const Heads h = pick(f.heads, row[heads]);
  const std::int64_t states = h.batch * h.heads * (pick(f.tokens, row[tokens]) / length + 1);
  return states * pick(f.dqk, row[dqk]) * pick(f.dhv, row[dhv]) * 8 <= 1 << 29;
}

Case make_case(const Factors& f, const Row& row) {
  const Heads h = pick(f.heads, row[heads]);
  const Variant v = variants[row[variant]];
  const DTypes d = dtypes[row[dtype]];
  Case c;
  c.regime = reference::all_regimes[row[regime]];
  c.shape = {.batch = h.batch,
             .tokens = pick(f.tokens, row[tokens]),
             .qk_heads = h.qk_heads,
             .heads = h.heads,
             .dqk = pick(f.dqk, row[dqk]),
             .dhv = pick(f.dhv, row[dhv]),
             .dtype = d.dtype,
             .gate_dtype = d.gate_dtype};
  if (h.packing != Packing::none) c.cu_seqlens = boundaries(c.shape.tokens, h.packing);
  if (h.packing == Packing::padded) c.index_stride = 3;
  c.options = {.gate = v.gate,
               .normalizer = v.normalizer,
               .exact_normalizer_grad = row[exact] == 1,
               .chunk_size = pick(f.chunk_sizes, row[chunk]),
               .formulation = static_cast<Formulation>(row[formulation])};
  if (row[cap] == 1) c.options.soft_cap = 15;
  c.layout = static_cast<Layout>(row[layout]);
  c.initial_state = row[state] > 0;
  c.in_place = row[state] == 2;
  c.last_state_grad = row[grad] == 1;
  return c;
}

std::vector<Row> table(const Factors& f) {
  return pairwise(levels(f), [&](const Row& row) { return sensible(f, row); });
}

std::vector<Case> cases(const Factors& f) {
  std::vector<Case> all;
  for (const Row& row : table(f)) all.push_back(make_case(f, row));
  return all;
}

// Batch 1, 4 heads, T = 1024, 128 / 256: where the errors in docs/numerics.md are measured. Where a denominator may
// come near zero the error of a draw hangs on its worst row, so those regimes are drawn several times.
std::vector<Case> documented_cases() {
  std::vector<Case> all;
  for (const Regime r : reference::all_regimes) {
    for (const Variant& v : variants) {
      const bool small_denominators = v.gate == InputGate::exponential && v.normalizer == Normalizer::max &&
                                      (r == Regime::large_i || r == Regime::capped_extremes);
      for (std::uint64_t seed = 1; seed <= (small_denominators ? 4 : 1); ++seed) {
        for (const DType d : {DType::float32, DType::bfloat16}) {
          Case c;
          c.regime = r;
          c.shape = {.tokens = 1024, .qk_heads = 4, .heads = 4, .dqk = 128, .dhv = 256, .dtype = d};
          c.options = {.gate = v.gate, .normalizer = v.normalizer};
          c.seed = seed;
          all.push_back(c);
        }
      }
    }
  }
  return all;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return std::to_string(info.index) + "_" + label(info.param);
}

class Accuracy : public ::testing::TestWithParam<Case> {};

TEST_P(Accuracy, WithinBounds) {
  const Case& description = GetParam();
  const bool with_backward = description.options.formulation != Formulation::recurrent;
  const Execution execution{.device = description.device};
  if (const std::string reason = why_unavailable(description.device); !reason.empty()) GTEST_SKIP() << reason;
  testkit::Problem problem(description);
  const testkit::Judge judge(problem, with_backward);
  forward(problem.forward(), execution);
  EXPECT_TRUE(within_bounds(judge.forward_errors(), description));
  if (!with_backward) return;
  backward(problem.backward(), execution);
  EXPECT_TRUE(within_bounds(judge.backward_errors(), description));
}

INSTANTIATE_TEST_SUITE_P(Pairs, Accuracy, ::testing::ValuesIn(cases(full)), case_name);
INSTANTIATE_TEST_SUITE_P(Small, Accuracy, ::testing::ValuesIn(cases(few)), case_name);
INSTANTIATE_TEST_SUITE_P(Documented, Accuracy, ::testing::ValuesIn(documented_cases()), case_name);

#ifdef TFLA_TEST_CUDA
// The same table with the device as one more column. Skipped by name where there is no GPU.
std::vector<Case> on_gpu(std::vector<Case> all) {
  for (std::size_t index = 0; index < all.size(); ++index) {
    all[index].device = Device::cuda;
    // Two cases of three hand something from forward to backward.
    all[index].options.keep = std::array{Keep::nothing, Keep::states, Keep::denominators}[index % 3];
  }
  return all;
}

// float32 in one chunk: there the gradient of the forget gate sums over the longest rows, where denominators may come
// near zero some of them a thousand times as large as others.
std::vector<Case> in_one_chunk() {
  std::vector<Case> all = documented_cases();
  std::erase_if(all, [](const Case& c) {
    return c.shape.dtype != DType::float32 || c.options.gate != InputGate::exponential ||
           c.options.normalizer != Normalizer::max;
  });
  for (Case& c : all) c.options.formulation = Formulation::parallel;
  return all;
}
INSTANTIATE_TEST_SUITE_P(PairsCuda, Accuracy, ::testing::ValuesIn(on_gpu(cases(full))), case_name);
INSTANTIATE_TEST_SUITE_P(DocumentedCuda, Accuracy, ::testing::ValuesIn(on_gpu(documented_cases())), case_name);
INSTANTIATE_TEST_SUITE_P(OneChunkCuda, Accuracy, ::testing::ValuesIn(on_gpu(in_one_chunk())), case_name);
#endif

TEST(AccuracySmall, EveryPairOfValuesMeets) {
  for (const Factors* f : {&full, &few}) {
    const std::vector<int> count = levels(*f);
    const std::vector<Row> rows = table(*f);
    std::set<std::tuple<std::size_t, int, std::size_t, int>> met;
    std::size_t expected = 0;
    for (std::size_t x = 0; x < factors; ++x) {
      for (std::size_t y = x + 1; y < factors; ++y) {
        expected += static_cast<std::size_t>(count[x]) * static_cast<std::size_t>(count[y]);
        for (const Row& row : rows) met.insert({x, row[x], y, row[y]});
      }
    }
    EXPECT_EQ(met.size(), expected);
  }
}

}  // namespace
}  // namespace tfla::test
