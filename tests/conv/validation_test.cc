// Bad arguments of the convolution are refused with a sentence that names them, before anything is written.
#include "tests/support/validation.h"

#include <cstddef>
#include <limits>
#include <span>

#include "tests/conv/problem.h"

namespace tfla::test {
namespace {

constexpr std::int64_t huge = std::int64_t{1} << 62;

ConvCase good_case() { return {.batch = 2, .tokens = 6, .channels = 3, .width = 4, .state = true}; }

ConvCase numbered_case() {
  ConvCase c = good_case();
  c.state = false;
  c.seq_idx = {0, 0, 1, 1, 1, 2, 0, 1, 1, 2, -1, -1};
  return c;
}

struct Steps {
  ConvProblem problem;
  testkit::Tensor state;
  ConvStep step;

  explicit Steps(const ConvCase& c) : problem(c), state(DType::float32, {c.batch, c.width, c.channels}) {
    overwrite(state.view, Values(static_cast<std::size_t>(c.batch * c.width * c.channels), 0));
    step = {.x = problem.forward.x,
            .weight = problem.forward.weight,
            .bias = problem.forward.bias,
            .y = problem.forward.y,
            .state = state.view,
            .options = problem.forward.options};
  }
};

// Rows that hold for forward, backward and step alike.
template <class Args>
std::vector<BadRow<Args>> common_rows() {
  return {
      {"x not given", "x", [](Args& a) { a.x = {}; }},
      {"weight not given", "weight", [](Args& a) { a.weight = {}; }},
      {"x of rank 2", "x", [](Args& a) { a.x.rank = 2; }},
      {"weight of rank 3", "weight", [](Args& a) { a.weight.rank = 3; }},
      {"bias of rank 2", "bias", [](Args& a) { a.bias.rank = 2; }},
      {"weight of other channels", "weight", [](Args& a) { a.weight.shape[0] = 2; }},
      {"bias of other channels", "bias", [](Args& a) { a.bias.shape[0] = 2; }},
      {"weight of width 0", "weight", [](Args& a) { a.weight.shape[1] = 0; }},
      {"weight of width 33", "weight", [](Args& a) { a.weight.shape[1] = 33; }},
      {"no channels", "D", [](Args& a) { a.x.shape[2] = 0; }},
      {"negative tokens", "x", [](Args& a) { a.x.shape[1] = -1; }},
      {"overflowing tokens", "x", [](Args& a) { a.x.shape[1] = huge; }},
      {"overflowing stride", "x", [](Args& a) { a.x.strides[0] = huge; }},
      {"x of integers", "x", [](Args& a) { a.x.dtype = DType::int32; }},
      {"weight of integers", "weight", [](Args& a) { a.weight.dtype = DType::int64; }},
      {"bias of no dtype", "bias", [](Args& a) { a.bias.dtype = static_cast<DType>(99); }},
      {"null x", "x", [](Args& a) { a.x.data = nullptr; }},
      {"null weight", "weight", [](Args& a) { a.weight.data = nullptr; }},
      {"null bias", "bias", [](Args& a) { a.bias.data = nullptr; }},
      {"misaligned x", "x", [](Args& a) { misalign(a.x); }},
      {"misaligned weight", "weight", [](Args& a) { misalign(a.weight, 2); }},
      {"no such activation", "activation", [](Args& a) { a.options.activation = static_cast<ConvActivation>(2); }},
  };
}

template <class Args>
std::vector<BadRow<Args>> sequence_rows() {
  static const std::int32_t beyond[] = {0, 7};
  auto rows = common_rows<Args>();
  const std::vector<BadRow<Args>> more = {
      {"state of other rows", "initial_state", [](Args& a) { a.initial_state.shape[1] = 4; }},
      {"state of another batch", "initial_state", [](Args& a) { a.initial_state.shape[0] = 1; }},
      {"state of integers", "initial_state", [](Args& a) { a.initial_state.dtype = DType::int32; }},
      {"packed in a batch of 2", "cu_seqlens",
       [](Args& a) {
         a.cu_seqlens = {beyond, DType::int32, {2}};
       }},
      {"seq_idx with a state", "seq_idx",
       [](Args& a) {
         a.seq_idx = {beyond, DType::int32, {2, 6}, {0, 0}};
       }},
  };
  rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

TEST(ConvValidationSmall, ForwardRefuses) {
  ConvProblem problem(good_case());
  auto rows = sequence_rows<ConvForward>();
  const std::vector<BadRow<ConvForward>> own = {
      {"y not given", "y", [](ConvForward& a) { a.y = {}; }},
      {"y of another shape", "y", [](ConvForward& a) { a.y.shape[1] = 5; }},
      {"y of another dtype", "y", [](ConvForward& a) { a.y.dtype = DType::bfloat16; }},
      {"y on x", "y|x", [](ConvForward& a) { move_onto(a.y, a.x); }},
      {"y that reaches an element twice", "y", [](ConvForward& a) { a.y.strides[1] = 0; }},
      {"last state of other rows", "last_state", [](ConvForward& a) { a.last_state.shape[1] = 2; }},
      {"last state on y", "last_state|y", [](ConvForward& a) { a.last_state.data = a.y.data; }},
      {"last state across the initial one", "last_state",
       [](ConvForward& a) { move_onto(a.last_state, a.initial_state); }},
  };
  rows.insert(rows.end(), own.begin(), own.end());
  expect_refused<ConvForward>(problem.forward, rows, [&] { return problem.contents(); });
}

TEST(ConvValidationSmall, BackwardRefuses) {
  ConvProblem problem(good_case());
  auto rows = sequence_rows<ConvBackward>();
  const std::vector<BadRow<ConvBackward>> own = {
      {"dy not given", "dy", [](ConvBackward& a) { a.dy = {}; }},
      {"dy of another dtype", "dy", [](ConvBackward& a) { a.dy.dtype = DType::float64; }},
      {"dx of another shape", "dx", [](ConvBackward& a) { a.dx.shape[2] = 2; }},
      {"dweight not given", "dweight", [](ConvBackward& a) { a.dweight = {}; }},
      {"dweight of another dtype", "dweight", [](ConvBackward& a) { a.dweight.dtype = DType::bfloat16; }},
      {"dbias without bias", "dbias", [](ConvBackward& a) { a.bias = {}; }},
      {"bias without dbias", "dbias", [](ConvBackward& a) { a.dbias = {}; }},
      {"dlast_state of other channels", "dlast_state", [](ConvBackward& a) { a.dlast_state.shape[2] = 2; }},
      {"dinitial_state of other rows", "dinitial_state", [](ConvBackward& a) { a.dinitial_state.shape[1] = 2; }},
      {"dx on dy", "dx|dy", [](ConvBackward& a) { move_onto(a.dx, a.dy); }},
      {"dweight on weight", "dweight|weight", [](ConvBackward& a) { move_onto(a.dweight, a.weight); }},
  };
  rows.insert(rows.end(), own.begin(), own.end());
  expect_refused<ConvBackward>(problem.backward, rows, [&] { return problem.contents(); });
}

TEST(ConvValidationSmall, StepRefuses) {
  static const std::int32_t slots[] = {0, 2}, twice[] = {1, 1}, negative[] = {0, -1};
  Steps steps(good_case());
  auto rows = common_rows<ConvStep>();
  const std::vector<BadRow<ConvStep>> own = {
      {"state not given", "state", [](ConvStep& a) { a.state = {}; }},
      {"state too short", "state", [](ConvStep& a) { a.state.shape[1] = 2; }},
      {"state of other channels", "state", [](ConvStep& a) { a.state.shape[2] = 2; }},
      {"states for another batch", "state", [](ConvStep& a) { a.state.shape[0] = 1; }},
      {"state of integers", "state", [](ConvStep& a) { a.state.dtype = DType::int32; }},
      {"y on the state", "y|state", [](ConvStep& a) { a.y.data = a.state.data; }},
      {"slot out of range", "slots",
       [](ConvStep& a) {
         a.slots = {slots, DType::int32, {2}};
       }},
      {"slot twice", "slots",
       [](ConvStep& a) {
         a.slots = {twice, DType::int32, {2}};
       }},
      {"negative cache_seqlens", "cache_seqlens",
       [](ConvStep& a) {
         a.cache_seqlens = {negative, DType::int32, {2}};
       }},
      {"cache_seqlens of another batch", "cache_seqlens",
       [](ConvStep& a) {
         a.cache_seqlens = {slots, DType::int32, {1}};
       }},
  };
  rows.insert(rows.end(), own.begin(), own.end());
  expect_refused<ConvStep>(steps.step, rows, [&] {
    Snapshot all = steps.problem.contents();
    all["state"] = testkit::gather(steps.state.view);
    return all;
  });
}

TEST(ConvValidationSmall, PackedSequencesThatDoNotFitAreRefused) {
  static const std::int32_t falling[] = {0, 4, 2}, beyond[] = {0, 3, 7}, late[] = {1, 2, 6};
  ConvCase c = good_case();
  c.batch = 1;
  c.cu_seqlens = {0, 2, 6};
  ConvProblem problem(c);
  for (const std::int32_t* bounds : {falling, beyond, late}) {
    ConvForward f = problem.forward;
    ConvBackward b = problem.backward;
    f.cu_seqlens.data = b.cu_seqlens.data = bounds;
    expect_sentence(refusal([&] { conv_forward(f); }), "cu_seqlens");
    expect_sentence(refusal([&] { conv_backward(b); }), "cu_seqlens");
  }
}

TEST(ConvValidationSmall, NumbersThatComeBackAreRefused) {
  static const std::int32_t back[] = {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                            padded[] = {0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                            far[] = {0, 1, 1, 1, 0, 0, 0, -1, 1, -1, 2, -1};
  ConvProblem problem(numbered_case());
  ConvForward args = problem.forward;
  EXPECT_NO_THROW(conv_forward(args));
  for (const std::int32_t* numbers : {back, padded}) {
    args.seq_idx.data = numbers;
    expect_sentence(refusal([&] { conv_forward(args); }), "seq_idx");
  }
  args.seq_idx.data = far;
  EXPECT_NO_THROW(conv_forward(args));
  args.seq_idx.dtype = DType::float32;
  expect_sentence(refusal([&] { conv_forward(args); }), "seq_idx");
}

TEST(ConvValidationSmall, PlansAndScratchOfOthersAreRefused) {
  ConvProblem problem(good_case());
  const ConvPlan plan = conv_plan(problem.forward);
  const testkit::Buffer memory(static_cast<std::int64_t>(plan.scratch_bytes) + 64);
  const auto scratch = [&](std::size_t begin, std::size_t bytes) { return std::span(memory.data() + begin, bytes); };
  expect_sentence(refusal([&] { conv_forward(problem.forward, plan, scratch(0, plan.scratch_bytes - 1)); }), "scratch");
  expect_sentence(refusal([&] { conv_forward(problem.forward, plan, scratch(8, plan.scratch_bytes)); }), "scratch");
  expect_sentence(refusal([&] { conv_backward(problem.backward, plan, scratch(0, plan.scratch_bytes)); }), "plan");
  for (const auto change :
       {+[](ConvCase& c) { c.tokens = 5; }, +[](ConvCase& c) { c.width = 3; }, +[](ConvCase& c) { c.silu = false; },
        +[](ConvCase& c) { c.layout = ConvLayout::tokens; }, +[](ConvCase& c) { c.dtype = DType::bfloat16; }}) {
    ConvCase changed = good_case();
    change(changed);
    const ConvProblem other(changed);
    expect_sentence(refusal([&] { conv_forward(other.forward, plan, scratch(0, plan.scratch_bytes)); }), "plan");
  }
  EXPECT_THROW(conv_forward(problem.forward, {.device = Device::cuda}), Unavailable);
  EXPECT_TRUE(describe(plan).starts_with("operation       forward of the causal convolution\n")) << describe(plan);
}

}  // namespace
}  // namespace tfla::test
