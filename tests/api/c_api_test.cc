// The C API gives what the C++ API gives, bit for bit, and refuses what it refuses in the same words.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "reference/values.h"
#include "testkit/tensor.h"
#include "tests/support/support.h"
#include "tests/support/validation.h"
#include "tfla/tfla_c.h"

namespace tfla::test {
namespace {

using testkit::Case;
using testkit::gather;
using testkit::Layout;
using testkit::Problem;

// ---------------------------------------------------------------- the arguments of C++ in C

// A struct of the C API with nothing set but its size.
template <class Struct>
Struct sized() {
  Struct made{};
  made.struct_size = sizeof made;
  return made;
}

tfla_execution on_cuda() {
  auto execution = sized<tfla_execution>();
  execution.device = TFLA_CUDA;
  return execution;
}

tfla_tensor c(const TensorView& view) {
  tfla_tensor tensor{};
  tensor.data = const_cast<void*>(view.data);
  tensor.dtype = static_cast<std::int32_t>(view.dtype);
  tensor.rank = view.rank;
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.strides.begin(), view.strides.end(), tensor.strides);
  return tensor;
}
template <class View>
tfla_mlstm_state c(const BasicMlstmState<View>& state) {
  return {c(state.C), c(state.n), c(state.m)};
}
template <class View>
tfla_mlstm_state_grad c(const BasicMlstmStateGrad<View>& grad) {
  return {c(grad.C), c(grad.n)};
}

tfla_mlstm_options c(const MlstmOptions& options, std::int32_t keep = TFLA_KEEP_NOTHING) {
  return {.struct_size = sizeof(tfla_mlstm_options),
          .gate = static_cast<std::int32_t>(options.gate),
          .normalizer = static_cast<std::int32_t>(options.normalizer),
          .formulation = static_cast<std::int32_t>(options.formulation),
          .keep = keep,
          .chunk_size = options.chunk_size,
          .exact_normalizer_grad = options.exact_normalizer_grad ? 1 : 0,
          .has_eps = options.eps != MlstmOptions{}.eps ? 1 : 0,
          .has_qk_scale = options.qk_scale ? 1 : 0,
          .has_soft_cap = options.soft_cap ? 1 : 0,
          .eps = options.eps,
          .qk_scale = options.qk_scale.value_or(-7),  // not to be looked at
          .soft_cap = options.soft_cap.value_or(-7)};
}

tfla_mlstm_forward_args c(const MlstmForward& a, const tfla_mlstm_options* options) {
  return {.struct_size = sizeof(tfla_mlstm_forward_args),
          .options = options,
          .q = c(a.q),
          .k = c(a.k),
          .v = c(a.v),
          .i = c(a.i),
          .f = c(a.f),
          .h = c(a.h),
          .initial_state = c(a.initial_state),
          .last_state = c(a.last_state),
          .cu_seqlens = c(a.cu_seqlens),
          .saved = nullptr,
          .saved_bytes = 0};
}

tfla_mlstm_backward_args c(const MlstmBackward& a, const tfla_mlstm_options* options) {
  return {.struct_size = sizeof(tfla_mlstm_backward_args),
          .options = options,
          .q = c(a.q),
          .k = c(a.k),
          .v = c(a.v),
          .i = c(a.i),
          .f = c(a.f),
          .dh = c(a.dh),
          .dq = c(a.dq),
          .dk = c(a.dk),
          .dv = c(a.dv),
          .di = c(a.di),
          .df = c(a.df),
          .initial_state = c(a.initial_state),
          .dlast_state = c(a.dlast_state),
          .dinitial_state = c(a.dinitial_state),
          .cu_seqlens = c(a.cu_seqlens),
          .saved = nullptr,
          .saved_bytes = 0};
}

tfla_mlstm_step_args c(const MlstmStep& a, const tfla_mlstm_options* options) {
  return {.struct_size = sizeof(tfla_mlstm_step_args),
          .options = options,
          .q = c(a.q),
          .k = c(a.k),
          .v = c(a.v),
          .i = c(a.i),
          .f = c(a.f),
          .h = c(a.h),
          .state = c(a.state),
          .slots = c(a.slots)};
}

// One name for the three operations.
auto run(const tfla_mlstm_forward_args& args, const tfla_execution* on = nullptr) {
  return tfla_mlstm_forward(&args, on);
}
auto run(const tfla_mlstm_backward_args& args, const tfla_execution* on = nullptr) {
  return tfla_mlstm_backward(&args, on);
}
auto run(const tfla_mlstm_step_args& args, const tfla_execution* on = nullptr) { return tfla_mlstm_step(&args, on); }
auto make_plan(const tfla_mlstm_forward_args& args, tfla_plan** plan) {
  return tfla_plan_forward(&args, nullptr, plan);
}
auto make_plan(const tfla_mlstm_backward_args& args, tfla_plan** plan) {
  return tfla_plan_backward(&args, nullptr, plan);
}
auto make_plan(const tfla_mlstm_step_args& args, tfla_plan** plan) { return tfla_plan_step(&args, nullptr, plan); }
auto run_plan(const tfla_mlstm_forward_args& args, const tfla_plan* plan, void* scratch, std::size_t bytes) {
  return tfla_run_forward(&args, plan, scratch, bytes, nullptr);
}
auto run_plan(const tfla_mlstm_backward_args& args, const tfla_plan* plan, void* scratch, std::size_t bytes) {
  return tfla_run_backward(&args, plan, scratch, bytes, nullptr);
}
auto run_plan(const tfla_mlstm_step_args& args, const tfla_plan* plan, void* scratch, std::size_t bytes) {
  return tfla_run_step(&args, plan, scratch, bytes, nullptr);
}

// ---------------------------------------------------------------- results

Case shaped(const MlstmShape& shape, const MlstmOptions& options, Layout layout = Layout::bthd) {
  Case made;
  made.shape = shape;
  made.options = options;
  made.layout = layout;
  made.initial_state = true;
  made.last_state_grad = true;
  return made;
}

// Every option away from its default in some row.
std::vector<Case> cases() {
  const MlstmShape plain{.batch = 2, .tokens = 70, .qk_heads = 2, .heads = 4, .dqk = 8, .dhv = 12};
  MlstmShape f64 = plain, bf16 = plain, f16 = plain;
  f64.dtype = f64.gate_dtype = DType::float64;
  bf16.dtype = DType::bfloat16;
  f16.dtype = f16.gate_dtype = DType::float16;
  std::vector<Case> all{
      shaped(plain, {}),
      shaped({.batch = 1, .tokens = 1, .dqk = 1, .dhv = 1}, {}),
      shaped(f64, {.gate = InputGate::sigmoid, .normalizer = Normalizer::max, .exact_normalizer_grad = true},
             Layout::bhtd),
      shaped(bf16, {.eps = 1e-3, .qk_scale = 0.3, .soft_cap = 15}, Layout::fused),
      shaped(f16, {.gate = InputGate::log, .chunk_size = 16}, Layout::bhtd),
      shaped(plain, {.normalizer = Normalizer::none, .formulation = Formulation::parallel}),
      shaped({.batch = 1, .tokens = 90, .heads = 2, .dqk = 8, .dhv = 8}, {})};
  all[1].initial_state = all[1].last_state_grad = false;
  all.back().cu_seqlens = {0, 40, 41, 85};
  all.back().shape.packed = true;
  return all;
}

// A call through C, with memory of its own and with the caller's, is the call through C++.
template <class Args, class Twin>
void expect_same(const Args& args, const Twin& twin, const std::function<void()>& prepare) {
  prepare();
  run_operation(args);
  const Snapshot expected = snapshot(args);

  prepare();
  ASSERT_EQ(run(twin), TFLA_OK) << tfla_last_error();
  EXPECT_TRUE(same_bits(snapshot(args), expected));

  prepare();
  const Plan chosen = plan(args);
  tfla_plan* same = nullptr;
  ASSERT_EQ(make_plan(twin, &same), TFLA_OK) << tfla_last_error();
  EXPECT_EQ(tfla_plan_scratch_bytes(same), chosen.scratch_bytes);
  EXPECT_EQ(tfla_plan_saved_bytes(same), chosen.saved_bytes);
  std::string page(tfla_plan_describe(same, nullptr, 0), '?');
  EXPECT_EQ(tfla_plan_describe(same, page.data(), page.size() + 1), page.size());
  EXPECT_EQ(page, describe(chosen));
  std::string start(9, '?');
  EXPECT_EQ(tfla_plan_describe(same, start.data(), 8), page.size());
  EXPECT_EQ(start, page.substr(0, 7) + std::string("\0?", 2));
  const testkit::Buffer scratch(static_cast<std::int64_t>(chosen.scratch_bytes));
  EXPECT_EQ(run_plan(twin, same, scratch.data(), chosen.scratch_bytes), TFLA_OK) << tfla_last_error();
  EXPECT_TRUE(same_bits(snapshot(args), expected));
  EXPECT_TRUE(scratch.margins_intact());
  tfla_plan_free(same);
}

TEST(CApiSmall, ForwardAndBackwardAreThoseOfCpp) {
  for (const Case& description : cases()) {
    SCOPED_TRACE(label(description));
    Problem problem(description);
    const tfla_mlstm_options options = c(description.options);
    expect_same(problem.forward(), c(problem.forward(), &options), [&] { problem.poison(); });
    expect_same(problem.backward(), c(problem.backward(), &options), [&] { problem.poison(); });
  }
}

TEST(CApiSmall, StepIsThatOfCpp) {
  for (const Case& description : cases()) {
    if (!description.initial_state || description.shape.packed) continue;
    SCOPED_TRACE(label(description));
    Problem problem(description);
    const MlstmForward& f = problem.forward();
    const std::array<std::int64_t, 2> slots{1, -1};
    MlstmStep args{.q = f.q, .k = f.k, .v = f.v, .i = f.i, .f = f.f, .h = f.h, .state = f.last_state};
    args.options = f.options;
    args.options.formulation = Formulation::chunkwise;
    args.slots = {slots.data(), DType::int64, {2}};
    const tfla_mlstm_options options = c(args.options);
    expect_same(args, c(args, &options), [&] {
      problem.poison();
      overwrite(f.last_state.C, gather(f.initial_state.C));
      overwrite(f.last_state.n, gather(f.initial_state.n));
      overwrite(f.last_state.m, gather(f.initial_state.m));
    });
  }
}

TEST(CApiSmall, WithoutOptionsTheyAreTheDefaults) {
  Problem problem(shaped({.batch = 1, .tokens = 20, .heads = 2, .dqk = 4, .dhv = 4}, {}));
  expect_same(problem.forward(), c(problem.forward(), nullptr), [&] { problem.poison(); });
  const auto zeros = sized<tfla_mlstm_options>();
  expect_same(problem.forward(), c(problem.forward(), &zeros), [&] { problem.poison(); });
}

TEST(CApiSmall, DenseIsRowMajor) {
  const std::array<float, 24> memory{};
  const std::array<std::int64_t, 3> shape{2, 3, 4};
  const tfla_tensor made = tfla_dense(memory.data(), TFLA_FLOAT32, 3, shape.data());
  const tfla_tensor expected = c(TensorView(memory.data(), DType::float32, {2, 3, 4}));
  EXPECT_EQ(std::memcmp(&made, &expected, sizeof made), 0);
}

// ---------------------------------------------------------------- what is refused

struct Refused {
  const char* what;
  const char* words;  // of the sentence
  std::function<void(tfla_mlstm_forward_args&, tfla_mlstm_options&, tfla_execution&)> spoil;
  tfla_status status = TFLA_INVALID_ARGUMENT;
};

const Refused refused[] = {
    {"size of arguments", "args->struct_size is 0", [](auto& a, auto&, auto&) { a.struct_size = 0; }},
    {"size of options", "options->struct_size is 8", [](auto&, auto& o, auto&) { o.struct_size = 8; }},
    {"size of execution", "execution->struct_size is 31", [](auto&, auto&, auto& e) { e.struct_size = 31; }},
    {"head dimension", "k has", [](auto& a, auto&, auto&) { a.k.shape[3] += 1; }},
    {"rank", "q has", [](auto& a, auto&, auto&) { a.q.rank = 5; }},
    {"negative rank", "q has", [](auto& a, auto&, auto&) { a.q.rank = -1; }},
    {"dtype", "unknown dtype", [](auto& a, auto&, auto&) { a.q.dtype = 77; }},
    {"large dtype", "unknown dtype", [](auto& a, auto&, auto&) { a.q.dtype = 256; }},
    {"gate", "gate", [](auto&, auto& o, auto&) { o.gate = -1; }},
    {"normalizer", "normalizer", [](auto&, auto& o, auto&) { o.normalizer = 3; }},
    {"formulation", "formulation", [](auto&, auto& o, auto&) { o.formulation = 256; }},
    {"keep", "options.keep is 3", [](auto&, auto& o, auto&) { o.keep = 3; }},
    {"negative keep", "options.keep is -1", [](auto&, auto& o, auto&) { o.keep = -1; }},
    {"eps", "eps", [](auto&, auto& o, auto&) { o.has_eps = 1, o.eps = -1; }},
    {"scale", "qk_scale", [](auto&, auto& o, auto&) { o.has_qk_scale = 1, o.qk_scale = 0.0 / 0.0; }},
    {"cap", "soft_cap", [](auto&, auto& o, auto&) { o.has_soft_cap = 1, o.soft_cap = -2; }},
    {"threads", "threads", [](auto&, auto&, auto& e) { e.threads = -1; }},
    {"device", "device", [](auto&, auto&, auto& e) { e.device = 256; }},
    {"saved", "saved has 64 bytes", [](auto& a, auto&, auto&) { a.saved_bytes = 64; }},
};

TEST(CApiSmall, WhatIsRefusedIsSaid) {
  Problem problem(shaped({.batch = 1, .tokens = 20, .heads = 2, .dqk = 4, .dhv = 4}, {}));
  const Snapshot before = snapshot(problem.forward());
  for (const Refused& row : refused) {
    SCOPED_TRACE(row.what);
    auto options = sized<tfla_mlstm_options>();
    auto execution = sized<tfla_execution>();
    tfla_mlstm_forward_args args = c(problem.forward(), &options);
    row.spoil(args, options, execution);
    EXPECT_EQ(run(args, &execution), row.status);
    const std::string sentence = tfla_last_error();
    EXPECT_TRUE(sentence.starts_with("tfla: ")) << sentence;
    EXPECT_NE(sentence.find(row.words), std::string::npos) << sentence;
    EXPECT_TRUE(same_bits(snapshot(problem.forward()), before));
  }
}

TEST(CApiSmall, NothingIsNoArgument) {
  tfla_plan* plan = nullptr;
  EXPECT_EQ(tfla_mlstm_forward(nullptr, nullptr), TFLA_INVALID_ARGUMENT);
  EXPECT_STREQ(tfla_last_error(), "tfla: args is NULL");
  EXPECT_EQ(tfla_plan_step(nullptr, nullptr, &plan), TFLA_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  Problem problem(shaped({.batch = 1, .tokens = 4, .dqk = 4, .dhv = 4}, {}));
  const tfla_mlstm_backward_args args = c(problem.backward(), nullptr);
  EXPECT_EQ(tfla_plan_backward(&args, nullptr, nullptr), TFLA_INVALID_ARGUMENT);
  EXPECT_EQ(tfla_run_backward(&args, nullptr, nullptr, 0, nullptr), TFLA_INVALID_ARGUMENT);
  EXPECT_EQ(tfla_plan_scratch_bytes(nullptr), 0U);
  EXPECT_EQ(tfla_plan_saved_bytes(nullptr), 0U);
  EXPECT_EQ(tfla_plan_describe(nullptr, nullptr, 0), 0U);
  EXPECT_STREQ(tfla_last_error(), "tfla: plan is NULL");
  tfla_plan_free(nullptr);
}

TEST(CApiSmall, AMachineWithoutAGpuIsUnavailable) {
  if (why_unavailable(Device::cuda).empty()) GTEST_SKIP() << "there is a GPU";
  Problem problem(shaped({.batch = 1, .tokens = 4, .dqk = 4, .dhv = 4}, {}));
  const tfla_execution cuda = on_cuda();
  EXPECT_EQ(run(c(problem.forward(), nullptr), &cuda), TFLA_UNAVAILABLE);
  EXPECT_EQ(tfla_last_error(), why_unavailable(Device::cuda));
}

// A caller that was compiled with a later header, whose struct is longer.
TEST(CApiSmall, FieldsOfALaterVersionHaveToBeZero) {
  struct Later {
    tfla_mlstm_forward_args args;
    std::int64_t added;
  };
  Problem problem(shaped({.batch = 1, .tokens = 20, .heads = 2, .dqk = 4, .dhv = 4}, {}));
  Later later{c(problem.forward(), nullptr), 0};
  later.args.struct_size = sizeof later;
  EXPECT_EQ(tfla_mlstm_forward(&later.args, nullptr), TFLA_OK) << tfla_last_error();
  later.added = 1;
  EXPECT_EQ(tfla_mlstm_forward(&later.args, nullptr), TFLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tfla_last_error()).find("fields that tfla " + std::string(tfla_version()) + " does not know"),
            std::string::npos);
}

// What is kept is one of the options that a plan is made for.
TEST(CApiSmall, PlansAreForWhatIsKept) {
  Problem problem(shaped({.batch = 1, .tokens = 20, .heads = 2, .dqk = 4, .dhv = 4}, {}));
  for (const int planned : {TFLA_KEEP_NOTHING, TFLA_KEEP_DENOMINATORS, TFLA_KEEP_STATES}) {
    for (const int called : {TFLA_KEEP_NOTHING, TFLA_KEEP_DENOMINATORS, TFLA_KEEP_STATES}) {
      const tfla_mlstm_options first = c(MlstmOptions{}, planned), second = c(MlstmOptions{}, called);
      tfla_plan* plan = nullptr;
      ASSERT_EQ(make_plan(c(problem.forward(), &first), &plan), TFLA_OK) << tfla_last_error();
      const testkit::Buffer scratch(static_cast<std::int64_t>(tfla_plan_scratch_bytes(plan)));
      EXPECT_EQ(run_plan(c(problem.forward(), &second), plan, scratch.data(), tfla_plan_scratch_bytes(plan)),
                planned == called ? TFLA_OK : TFLA_INVALID_ARGUMENT);
      tfla_plan_free(plan);
    }
  }
}

TEST(CApiSmall, EveryThreadHasItsOwnError) {
  EXPECT_EQ(tfla_mlstm_forward(nullptr, nullptr), TFLA_INVALID_ARGUMENT);
  std::string elsewhere = "?";
  std::thread([&] { elsewhere = tfla_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_STREQ(tfla_last_error(), "tfla: args is NULL");
}

#ifdef TFLA_TEST_CUDA
TEST(CApiCuda, KeepsWhatCppKeeps) {
  if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  Case description = shaped({.batch = 1, .tokens = 256, .heads = 2, .dqk = 128, .dhv = 128}, {});
  description.device = Device::cuda;
  description.shape.dtype = DType::bfloat16;
  Problem problem(description);
  const tfla_execution cuda = on_cuda();
  std::size_t before = 0;
  for (const int keep : {TFLA_KEEP_NOTHING, TFLA_KEEP_DENOMINATORS, TFLA_KEEP_STATES}) {
    const tfla_mlstm_options options = c(MlstmOptions{}, keep);
    const tfla_mlstm_forward_args args = c(problem.forward(), &options);
    tfla_plan* plan = nullptr;
    ASSERT_EQ(tfla_plan_forward(&args, &cuda, &plan), TFLA_OK) << tfla_last_error();
    const std::size_t saved = tfla_plan_saved_bytes(plan);
    EXPECT_TRUE(keep == TFLA_KEEP_NOTHING ? saved == 0 : saved > before) << saved;
    before = saved;
    tfla_plan_free(plan);
  }
}
#endif

}  // namespace
}  // namespace tfla::test
