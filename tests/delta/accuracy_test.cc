// Errors of the delta rule against the float64 reference: dtypes x gates x shapes x packings x chunk sizes x layouts,
// and the regimes that strain the arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/delta/problem.h"
#include "tests/support/pairwise.h"

namespace tfla::test {
namespace {

using testkit::Layout;

struct DTypes {
  DType dtype, beta, g;
};
constexpr DTypes dtypes[] = {
    {DType::float32, DType::float32, DType::float32},   {DType::float64, DType::float64, DType::float64},
    {DType::bfloat16, DType::bfloat16, DType::float32}, {DType::float16, DType::float16, DType::float16},
    {DType::bfloat16, DType::float32, DType::bfloat16}, {DType::float16, DType::float32, DType::float32},
    {DType::float32, DType::bfloat16, DType::float64},  {DType::float64, DType::float32, DType::float16}};

// whole: uneven sequences, one of them empty, one of one token. padded: the same with tokens behind the last, and
// boundaries that are a column of a table. single: one sequence with padding behind it.
enum class Packing : std::uint8_t { none, whole, padded, single };

struct Heads {
  std::int64_t batch, heads, qk_heads;
  Packing packing;
};

struct Dims {
  std::int64_t dqk, dhv;
};

// The values of every factor. Two tables are drawn from it: a full one, and one small enough for sanitizers.
struct Factors {
  std::vector<std::int64_t> chunk_sizes, tokens;
  std::vector<Dims> dims;
  std::vector<Heads> heads;
};
const Factors full{.chunk_sizes = {0, 16, 1, 64, 5, 1000},
                   .tokens = {65, 300, 1, 16, 17, 129, 2, 64, 15, 63},
                   .dims = {{64, 64}, {1, 7}, {128, 128}, {16, 1}, {100, 200}, {7, 16}, {33, 65}},
                   .heads = {{2, 2, 2, Packing::none},
                             {1, 4, 2, Packing::none},
                             {1, 4, 1, Packing::whole},
                             {3, 2, 1, Packing::none},
                             {1, 2, 2, Packing::padded},
                             {1, 2, 1, Packing::single}}};
const Factors few{
    .chunk_sizes = {0, 16, 1, 5, 1000},
    .tokens = {65, 17, 1, 2, 40},
    .dims = {{16, 8}, {1, 3}, {5, 1}, {9, 24}},
    .heads = {
        {2, 2, 2, Packing::none}, {1, 4, 1, Packing::padded}, {1, 4, 2, Packing::whole}, {1, 2, 2, Packing::single}}};

std::vector<std::int64_t> boundaries(std::int64_t tokens, Packing packing) {
  const std::int64_t third = tokens / 3, end = packing == Packing::whole ? tokens : tokens - tokens / 5;
  if (packing == Packing::single) return {0, end};
  return {0, third, third, std::min(third + 1, end), end};
}

enum Factor : std::size_t {
  dtype,
  decay,
  write,
  normalize,
  chunk,
  tokens,
  dims,
  heads,
  layout,
  state,
  grad,
  threads,
  scale,
  factors
};

std::vector<int> levels(const Factors& f) {
  const auto size = [](const auto& x) { return static_cast<int>(std::size(x)); };
  std::vector<int> count(factors, 2);
  count[dtype] = size(dtypes);
  count[decay] = 4;
  count[write] = 3;
  count[chunk] = size(f.chunk_sizes);
  count[tokens] = size(f.tokens);
  count[dims] = size(f.dims);
  count[heads] = size(f.heads);
  count[layout] = 3;
  count[state] = 4;
  return count;
}

template <class Range>
auto pick(const Range& values, int index) {
  return *(std::begin(values) + index);
}

DeltaCase make_case(const Factors& f, const Row& row) {
  const Heads h = pick(f.heads, row[heads]);
  const DTypes d = dtypes[row[dtype]];
  const Dims dim = pick(f.dims, row[dims]);
  DeltaCase c;
  c.shape = {.batch = h.batch,
             .tokens = pick(f.tokens, row[tokens]),
             .qk_heads = h.qk_heads,
             .heads = h.heads,
             .dqk = dim.dqk,
             .dhv = dim.dhv,
             .dtype = d.dtype,
             .gate_dtype = d.beta};
  c.g_dtype = d.g;
  c.decay = static_cast<Decay>(row[decay]);
  if (h.packing != Packing::none) c.cu_seqlens = boundaries(c.shape.tokens, h.packing);
  if (h.packing == Packing::padded) c.index_stride = 3;
  c.options = {.write = static_cast<WriteGate>(row[write]),
               .normalize_qk = row[normalize] == 1,
               .chunk_size = pick(f.chunk_sizes, row[chunk])};
  if (row[scale] == 1) c.options.qk_scale = -0.37;
  c.layout = static_cast<Layout>(row[layout]);
  c.initial_state = row[state] == 1 || row[state] == 2;
  c.in_place = row[state] == 2;
  c.last_state = row[state] != 3;
  c.last_state_grad = row[grad] == 1;
  c.threads = row[threads] == 1 ? 3 : 1;
  return c;
}

std::vector<Row> table(const Factors& f) {
  return pairwise(levels(f), [](const Row&) { return true; });
}

std::vector<DeltaCase> cases(const Factors& f) {
  std::vector<DeltaCase> all;
  for (const Row& row : table(f)) all.push_back(make_case(f, row));
  return all;
}

// Every regime with and without decay and states, and what normalisation, gates and 16 bits make of it.
std::vector<DeltaCase> regimes(std::int64_t tokens, Dims dim) {
  struct Variant {
    DTypes dtypes;
    WriteGate write;
    bool normalize;
    Decay decay;
    std::int64_t chunk_size;
  };
  constexpr Variant variants[] = {
      {dtypes[0], WriteGate::plain, false, Decay::log, 0},
      {dtypes[0], WriteGate::plain, false, Decay::none, 64},
      {dtypes[0], WriteGate::twice_sigmoid, true, Decay::biased, 16},
      {dtypes[1], WriteGate::plain, false, Decay::log, 0},
      {dtypes[2], WriteGate::plain, false, Decay::log, 0},
      {dtypes[3], WriteGate::plain, true, Decay::rate, 0},
  };
  std::vector<DeltaCase> all;
  for (const DeltaRegime regime : all_delta_regimes) {
    for (const Variant& v : variants) {
      DeltaCase c;
      c.regime = regime;
      c.shape = {.tokens = tokens,
                 .qk_heads = 1,
                 .heads = 2,
                 .dqk = dim.dqk,
                 .dhv = dim.dhv,
                 .dtype = v.dtypes.dtype,
                 .gate_dtype = v.dtypes.beta};
      c.g_dtype = v.dtypes.g;
      c.decay = v.decay;
      c.options = {.write = v.write, .normalize_qk = v.normalize, .chunk_size = v.chunk_size};
      c.initial_state = c.last_state_grad = true;
      all.push_back(c);
    }
  }
  return all;
}

// Few dimensions and many tokens: errors of states that are carried on and on, and gradients all the way back.
std::vector<DeltaCase> long_cases() {
  std::vector<DeltaCase> all;
  for (const DeltaRegime regime : {DeltaRegime::ordinary, DeltaRegime::kept, DeltaRegime::lasting, DeltaRegime::twofold,
                                   DeltaRegime::one_key_beyond, DeltaRegime::extremes}) {
    for (const DTypes& d : {dtypes[0], dtypes[1], dtypes[2]}) {
      DeltaCase c;
      c.regime = regime;
      c.shape = {.tokens = 4096, .dqk = 12, .dhv = 9, .dtype = d.dtype, .gate_dtype = d.beta};
      c.g_dtype = d.g;
      c.decay = regime == DeltaRegime::twofold ? Decay::none : Decay::log;
      c.initial_state = c.last_state_grad = true;
      all.push_back(c);
    }
  }
  return all;
}

std::string case_name(const ::testing::TestParamInfo<DeltaCase>& info) {
  return std::to_string(info.index) + "_" + label(info.param);
}

class DeltaAccuracy : public ::testing::TestWithParam<DeltaCase> {};

TEST_P(DeltaAccuracy, WithinBounds) {
  if (const std::string reason = why_unavailable(GetParam().device); !reason.empty()) GTEST_SKIP() << reason;
  DeltaProblem problem(GetParam());
  const DeltaJudge judge(problem);
  EXPECT_TRUE(judge.within_bounds(run_forward(problem)));
  EXPECT_TRUE(problem.surroundings_intact());
  EXPECT_TRUE(judge.within_bounds(run_backward(problem)));
  EXPECT_TRUE(problem.surroundings_intact());
}

class DeltaStepAccuracy : public ::testing::TestWithParam<DeltaCase> {};

// One token after another in one call, and T calls of one token.
TEST_P(DeltaStepAccuracy, WithinBounds) {
  const DeltaCase& c = GetParam();
  if (const std::string reason = why_unavailable(c.device); !reason.empty()) GTEST_SKIP() << reason;
  DeltaProblem problem(c);
  const DeltaJudge judge(problem);
  const DeltaForward& f = problem.forward;
  const DeltaStep whole{.q = f.q,
                        .k = f.k,
                        .v = f.v,
                        .beta = f.beta,
                        .g = f.g,
                        .A_log = f.A_log,
                        .dt_bias = f.dt_bias,
                        .h = f.h,
                        .state = f.last_state,
                        .options = f.options};
  delta_step(whole, {.device = c.device, .threads = c.threads, .portable = c.device == Device::cuda, .untested = true});
  const Snapshot at_once = snapshot(outputs(whole));
  EXPECT_TRUE(judge.within_bounds(at_once));
  EXPECT_TRUE(problem.surroundings_intact());
  problem.poison();
  for (std::int64_t t = 0; t < c.shape.tokens; ++t) {
    DeltaStep one = whole;
    for (TensorView* view : {&one.q, &one.k, &one.v, &one.beta, &one.g}) *view = slice(*view, 1, t, 1);
    one.h = slice(one.h, 1, t, 1);
    delta_step(one, {.device = c.device, .threads = c.threads, .portable = c.device == Device::cuda, .untested = true});
  }
  EXPECT_TRUE(judge.within_bounds(snapshot(outputs(whole))));
  EXPECT_TRUE(problem.surroundings_intact());
}

// Step has no packed sequences, and its state is the first and the last one.
std::vector<DeltaCase> for_step(std::vector<DeltaCase> all) {
  std::erase_if(all, [](const DeltaCase& c) { return !c.cu_seqlens.empty(); });
  for (DeltaCase& c : all) c.initial_state = c.in_place = c.last_state = true;
  return all;
}

#ifdef TFLA_TEST_CUDA
// The same tables on a GPU.
std::vector<DeltaCase> on_cuda(std::vector<DeltaCase> all) {
  for (DeltaCase& c : all) c.device = Device::cuda;
  return all;
}

INSTANTIATE_TEST_SUITE_P(CudaPairs, DeltaAccuracy, ::testing::ValuesIn(on_cuda(cases(full))), case_name);
INSTANTIATE_TEST_SUITE_P(CudaRegimes, DeltaAccuracy, ::testing::ValuesIn(on_cuda(regimes(300, {64, 48}))), case_name);
INSTANTIATE_TEST_SUITE_P(CudaLong, DeltaAccuracy, ::testing::ValuesIn(on_cuda(long_cases())), case_name);
INSTANTIATE_TEST_SUITE_P(CudaPairs, DeltaStepAccuracy, ::testing::ValuesIn(on_cuda(for_step(cases(full)))), case_name);
INSTANTIATE_TEST_SUITE_P(CudaLong, DeltaStepAccuracy, ::testing::ValuesIn(on_cuda(for_step(long_cases()))), case_name);
#endif

INSTANTIATE_TEST_SUITE_P(Pairs, DeltaAccuracy, ::testing::ValuesIn(cases(full)), case_name);
INSTANTIATE_TEST_SUITE_P(Small, DeltaAccuracy, ::testing::ValuesIn(cases(few)), case_name);
INSTANTIATE_TEST_SUITE_P(Regimes, DeltaAccuracy, ::testing::ValuesIn(regimes(300, {64, 48})), case_name);
INSTANTIATE_TEST_SUITE_P(RegimesSmall, DeltaAccuracy, ::testing::ValuesIn(regimes(70, {17, 6})), case_name);
INSTANTIATE_TEST_SUITE_P(Long, DeltaAccuracy, ::testing::ValuesIn(long_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Pairs, DeltaStepAccuracy, ::testing::ValuesIn(for_step(cases(full))), case_name);
INSTANTIATE_TEST_SUITE_P(Small, DeltaStepAccuracy, ::testing::ValuesIn(for_step(cases(few))), case_name);
INSTANTIATE_TEST_SUITE_P(RegimesSmall, DeltaStepAccuracy, ::testing::ValuesIn(for_step(regimes(70, {17, 6}))),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Long, DeltaStepAccuracy, ::testing::ValuesIn(for_step(long_cases())), case_name);

TEST(DeltaAccuracySmall, EveryPairOfValuesMeets) {
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
