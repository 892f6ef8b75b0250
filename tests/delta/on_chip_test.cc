// The delta rule on Hopper, forward and backward, against the float64 reference.
#include <gtest/gtest.h>

#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "plan/operators/delta_cuda.h"
#include "tests/delta/parts.h"
#include "tests/delta/problem.h"
#include "tests/support/pairwise.h"

namespace tfla::test {
namespace {

using testkit::Layout;

// What may differ between two calls, one value of each factor per column of the table.
struct Size {
  std::int64_t batch, qk_heads, heads;
  std::vector<std::int64_t> cu_seqlens;  // in parts of 60 of the tokens
};
struct Dims {
  std::int64_t dqk, dhv;
};
const std::vector<Size> sizes = {
    {2, 2, 2, {}},        {1, 1, 5, {}}, {3, 1, 2, {}}, {1, 2, 2, {0, 60}}, {1, 1, 4, {0, 20, 20, 21, 50}},
    {1, 1, 3, {0, 1, 40}}};
const std::vector<Dims> dims = {{64, 64}, {128, 128}, {8, 8}, {96, 192}, {40, 72}, {128, 64}};
constexpr std::int64_t tokens[] = {65, 64, 1, 130, 63, 200};

enum Factor : std::size_t { size, dim, token, decay, write, normalize, layout, state, gates, factors };

DeltaCase make_case(const Row& row) {
  const Size& s = sizes[static_cast<std::size_t>(row[size])];
  const Dims& d = dims[static_cast<std::size_t>(row[dim])];
  DeltaCase c;
  c.shape = {.batch = s.batch,
             .tokens = tokens[row[token]],
             .qk_heads = s.qk_heads,
             .heads = s.heads,
             .dqk = d.dqk,
             .dhv = d.dhv,
             .dtype = DType::bfloat16,
             .gate_dtype = row[gates] == 0 ? DType::bfloat16 : DType::float32};
  for (const std::int64_t part : s.cu_seqlens) c.cu_seqlens.push_back(part * c.shape.tokens / 60);
  c.g_dtype = row[gates] == 0 ? DType::float32 : DType::bfloat16;
  c.decay = static_cast<Decay>(row[decay]);
  c.options = {.write = static_cast<WriteGate>(row[write]), .normalize_qk = row[normalize] == 1};
  if (row[normalize] == 1) c.options.qk_scale = -0.37;
  c.layout = row[layout] == 0 ? Layout::bthd : Layout::bhtd;  // rows of a fused one are not on 16 bytes
  c.initial_state = row[state] == 1 || row[state] == 2;
  c.in_place = row[state] == 2;
  c.last_state = row[state] != 3;
  c.last_state_grad = row[state] == 1 || row[state] == 3;
  c.device = Device::cuda;
  c.on_chip = true;
  return c;
}

std::vector<DeltaCase> pairs() {
  std::vector<int> levels(factors, 2);
  levels[size] = static_cast<int>(sizes.size());
  levels[dim] = static_cast<int>(dims.size());
  levels[token] = static_cast<int>(std::size(tokens));
  levels[decay] = 4;
  levels[write] = 3;
  levels[state] = 4;
  std::vector<DeltaCase> all;
  for (const Row& row : pairwise(levels, [](const Row&) { return true; })) all.push_back(make_case(row));
  return all;
}

// Every regime with keys of a length of their own, normalised, and without decay, where nothing wears off that
// roundings of a repeated key add up to.
std::vector<DeltaCase> regimes() {
  const struct {
    bool normalize;
    Decay decay;
  } variants[] = {{false, Decay::log}, {true, Decay::log}, {false, Decay::none}};
  std::vector<DeltaCase> all;
  for (const DeltaRegime regime : all_delta_regimes) {
    for (const auto& variant : variants) {
      DeltaCase c = delta_case({1, 500, 1, 2, 64, 64, 0, {}}, DType::bfloat16, variant.decay);
      c.regime = regime;
      c.g_dtype = DType::float32;
      c.options.write = WriteGate::plain;
      c.options.normalize_qk = variant.normalize;
      c.device = Device::cuda;
      c.on_chip = true;
      all.push_back(c);
    }
  }
  return all;
}

class DeltaOnChip : public ::testing::TestWithParam<DeltaCase> {};

TEST_P(DeltaOnChip, WithinBounds) {
  if (const std::string reason = why_unavailable(GetParam().device); !reason.empty()) GTEST_SKIP() << reason;
  DeltaProblem problem(GetParam());
  const DeltaPlan plan = delta_plan(problem.forward, {.device = Device::cuda, .untested = true});
  ASSERT_TRUE(launches(plan, DeltaKernel::forward_on_chip)) << describe(plan);
  const DeltaJudge judge(problem);
  const Snapshot first = run_forward(problem);
  EXPECT_TRUE(judge.within_bounds(first));
  EXPECT_TRUE(problem.surroundings_intact());
  EXPECT_EQ(run_forward(problem), first);  // the same bits

  const DeltaPlan back = delta_plan(problem.backward, {.device = Device::cuda, .untested = true});
  ASSERT_TRUE(launches(back, DeltaKernel::grad_states_on_chip)) << describe(back);
  const Snapshot gradients = run_backward(problem);
  EXPECT_TRUE(judge.within_bounds(gradients));
  EXPECT_TRUE(problem.surroundings_intact());
  EXPECT_EQ(run_backward(problem), gradients);
}

// Boxes of a tensor map begin on 16 bytes: where a row of any tensor does not, a call takes portable kernels, and a
// plan for others is refused.
template <class Args>
void expect_portable(const Args& args, std::initializer_list<TensorView Args::*> inputs,
                     std::initializer_list<MutableTensorView Args::*> outputs) {
  const Execution execution{.device = Device::cuda, .untested = true};
  const DeltaPlan straight = delta_plan(args, execution);
  ASSERT_TRUE(launches(straight, DeltaKernel::solve)) << describe(straight);
  const auto expect = [&](const Args& crooked) {
    const DeltaPlan plan = delta_plan(crooked, execution);
    EXPECT_FALSE(launches(plan, DeltaKernel::solve)) << describe(plan);
    try {
      if constexpr (requires { crooked.dh; }) {
        delta_backward(crooked, straight, {});
      } else {
        delta_forward(crooked, straight, {});
      }
      ADD_FAILURE() << "ran";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("16 bytes"), std::string::npos) << error.what();
    }
  };
  for (const auto member : inputs) {
    Args crooked = args;
    (crooked.*member).data = static_cast<const std::byte*>((crooked.*member).data) + 2;
    expect(crooked);
  }
  for (const auto member : outputs) {
    Args crooked = args;
    (crooked.*member).data = static_cast<std::byte*>((crooked.*member).data) + 2;
    expect(crooked);
  }
}

TEST(CudaDeltaOnChip, RowsThatAreNotOn16BytesTakePortableKernels) {
  if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  DeltaCase c = delta_case({1, 70, 1, 2, 64, 64, 0, {}}, DType::bfloat16, Decay::log);
  c.device = Device::cuda;
  const DeltaProblem problem(c);
  using F = DeltaForward;
  using B = DeltaBackward;
  expect_portable(problem.forward, {&F::q, &F::k, &F::v}, {&F::h});
  expect_portable(problem.backward, {&B::q, &B::k, &B::v, &B::dh}, {&B::dv});
}

std::string case_name(const ::testing::TestParamInfo<DeltaCase>& info) {
  return std::to_string(info.index) + "_" + label(info.param);
}

INSTANTIATE_TEST_SUITE_P(CudaPairs, DeltaOnChip, ::testing::ValuesIn(pairs()), case_name);
INSTANTIATE_TEST_SUITE_P(CudaRegimes, DeltaOnChip, ::testing::ValuesIn(regimes()), case_name);

}  // namespace
}  // namespace tfla::test
