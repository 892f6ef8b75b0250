// Bad arguments of the state space dual are refused with a sentence that names them, before anything is written.
#include "tests/ssd/validation.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>

namespace tfla::test {
namespace {

using testkit::gather;

constexpr std::int64_t huge = std::int64_t{1} << 62;

TEST(SsdValidationSmall, ForwardRefuses) {
  const SsdProblem problem(good_ssd_case());
  const auto contents = [&] { return all_contents(problem); };
  expect_refused(problem.forward, common_ssd_rows<SsdForward>(), contents);
  expect_refused(problem.forward, sequence_ssd_rows<SsdForward>(), contents);
  expect_refused(problem.forward, ssd_forward_rows(), contents);
}

TEST(SsdValidationSmall, BackwardRefuses) {
  const SsdProblem problem(good_ssd_case());
  const auto contents = [&] { return all_contents(problem); };
  expect_refused(problem.backward, common_ssd_rows<SsdBackward>(), contents);
  expect_refused(problem.backward, sequence_ssd_rows<SsdBackward>(), contents);
  expect_refused(problem.backward, ssd_backward_rows(), contents);
}

TEST(SsdValidationSmall, StepRefuses) {
  const SsdProblem problem(good_ssd_case());
  const auto contents = [&] { return all_contents(problem); };
  const SsdStep good = problem.step(problem.forward.last_state);
  // Zero bits in the state: "slots on the state" then reads slots that would all be 0, had the overlap been missed.
  overwrite(good.state, Values(gather(good.state).size(), 0));
  expect_refused(good, common_ssd_rows<SsdStep>(), contents);
  expect_refused(good, ssd_step_rows(), contents);
}

TEST(SsdValidationSmall, AStepInFloat64HasAStateInFloat64) {
  SsdCase c = good_ssd_case();
  c.shape.dtype = c.shape.gate_dtype = DType::float64;
  const SsdProblem problem(c);
  const SsdStep good = problem.step(problem.forward.last_state);
  expect_refused(good,
                 {{"state in float32", "state", [](SsdStep& a) { a.state.dtype = DType::float32; }},
                  {"state in bfloat16", "state", [](SsdStep& a) { a.state.dtype = DType::bfloat16; }}},
                 [&] { return all_contents(problem); });
}

// ---------------------------------------------------------------- packed sequences

template <class Args>
std::vector<BadRow<Args>> boundary_rows() {
  static const std::int64_t falling[] = {0, 7, 6}, late[] = {1, 2, 6}, past[] = {0, 2, 7};
  static const std::int64_t overflowing[] = {0, std::numeric_limits<std::int64_t>::max(), 6};
  static const double floats[] = {0, 2, 6};
  const auto given = [](const void* data, DType dtype, std::int64_t count) {
    return [=](Args& a) { a.cu_seqlens = TensorView(data, dtype, {count}); };
  };
  return {{"falling boundaries", "cu_seqlens falls from 7 to 6", given(falling, DType::int64, 3)},
          {"first boundary not 0", "cu_seqlens begins with 1", given(late, DType::int64, 3)},
          {"last boundary beyond T", "cu_seqlens ends with 7", given(past, DType::int64, 3)},
          {"huge boundary", "cu_seqlens", given(overflowing, DType::int64, 3)},
          {"boundaries of floats", "cu_seqlens", given(floats, DType::float64, 3)},
          {"no boundaries", "cu_seqlens is empty", given(falling, DType::int64, 0)},
          {"one boundary", "cu_seqlens has 1 element", given(falling, DType::int64, 1)},
          {"null boundaries", "cu_seqlens", given(nullptr, DType::int64, 3)},
          {"states of another number of sequences", "initial_state|cu_seqlens", [](Args& a) {
             static const std::int64_t three[] = {0, 2, 2, 6};
             a.cu_seqlens = TensorView(three, DType::int64, {4});
           }}};
}

TEST(SsdValidationSmall, BoundariesAreChecked) {
  SsdCase c = good_ssd_case();
  c.shape.batch = 1;
  c.cu_seqlens = {0, 2, 6};
  const SsdProblem packed(c);
  expect_refused(packed.forward, boundary_rows<SsdForward>(), [&] { return all_contents(packed); });
  expect_refused(packed.backward, boundary_rows<SsdBackward>(), [&] { return all_contents(packed); });
}

// ---------------------------------------------------------------- execution, plan and scratch

// Each way to run or plan the three operations of a problem.
std::vector<std::function<void(const Execution&)>> every_call(const SsdProblem& problem) {
  const SsdStep stepped = problem.step(problem.forward.last_state);
  return {[&](const Execution& e) { ssd_forward(problem.forward, e); },
          [&](const Execution& e) { ssd_backward(problem.backward, e); },
          [stepped](const Execution& e) { ssd_step(stepped, e); },
          [&](const Execution& e) { static_cast<void>(ssd_plan(problem.forward, e)); },
          [&](const Execution& e) { static_cast<void>(ssd_plan(problem.backward, e)); },
          [stepped](const Execution& e) { static_cast<void>(ssd_plan(stepped, e)); },
          [&](const Execution& e) {
            static_cast<void>(ssd_plan(Operation::forward, problem.description.shape, problem.forward.options, e));
          }};
}

TEST(SsdValidationSmall, ExecutionIsChecked) {
  const SsdProblem problem(good_ssd_case());
  const Snapshot before = all_contents(problem);
  for (const auto& call : every_call(problem)) {
    expect_sentence(refusal([&] { call({.threads = -1}); }), "threads");
    expect_sentence(refusal([&] { call({.device = static_cast<Device>(9)}); }), "device");
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
}

TEST(SsdValidationSmall, ThereAreNoKernelsForGpus) {
  const SsdProblem problem(good_ssd_case());
  const Snapshot before = all_contents(problem);
  for (const auto& call : every_call(problem)) {
    for (const bool portable : {false, true}) {
      try {
        call({.device = Device::cuda, .portable = portable});
        ADD_FAILURE() << "ran";
      } catch (const Unavailable& error) {
        expect_sentence(error.what(), "the state space dual has no CUDA kernels.*cpu");
      }
    }
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
}

TEST(SsdValidationSmall, AShapeAndOptionsAloneAreChecked) {
  const MlstmShape shape = SsdProblem(good_ssd_case()).description.shape;
  expect_sentence(refusal([&] { (void)ssd_plan(static_cast<Operation>(3), shape, {}); }), "operation");
  expect_sentence(refusal([&] { (void)ssd_plan(Operation::forward, shape, {.dt_min = -1}); }), "dt_min");
  MlstmShape bad = shape;
  bad.qk_heads = 3;
  EXPECT_FALSE(refusal([&] { (void)ssd_plan(Operation::forward, bad, {}); }).empty());
}

TEST(SsdValidationSmall, PlanAndScratchAreChecked) {
  const SsdProblem problem(good_ssd_case());
  const SsdForward& f = problem.forward;
  const SsdBackward& b = problem.backward;
  const SsdStep s = problem.step(f.last_state);
  const SsdPlan forward_plan = ssd_plan(f), backward_plan = ssd_plan(b), step_plan = ssd_plan(s);
  const std::size_t enough =
      std::max({forward_plan.scratch_bytes, backward_plan.scratch_bytes, step_plan.scratch_bytes});
  const testkit::Buffer memory(static_cast<std::int64_t>(enough) + 64);
  const auto scratch = [&](std::size_t offset, std::size_t bytes) { return std::span(memory.data() + offset, bytes); };
  const Snapshot before = all_contents(problem);
  for (const std::size_t offset : {0, 1, 32}) {
    const std::size_t missing = offset == 0 ? 1 : 0;
    const auto bad = [&](const SsdPlan& plan) { return scratch(offset, plan.scratch_bytes - missing); };
    expect_sentence(refusal([&] { ssd_forward(f, forward_plan, bad(forward_plan)); }), "scratch");
    expect_sentence(refusal([&] { ssd_backward(b, backward_plan, bad(backward_plan)); }), "scratch");
    expect_sentence(refusal([&] { ssd_step(s, step_plan, bad(step_plan)); }), "scratch");
  }
  expect_sentence(refusal([&] { ssd_forward(f, forward_plan, {}); }), "scratch");
  expect_sentence(refusal([&] { ssd_forward(f, backward_plan, scratch(0, enough)); }), "plan");
  expect_sentence(refusal([&] { ssd_backward(b, forward_plan, scratch(0, enough)); }), "plan");
  expect_sentence(refusal([&] { ssd_step(s, forward_plan, scratch(0, enough)); }), "plan");

  for (const auto change :
       {+[](SsdCase& c) { c.shape.tokens = 7; }, +[](SsdCase& c) { c.shape.dqk = 5; },
        +[](SsdCase& c) { c.shape.dhv = 4; }, +[](SsdCase& c) { c.shape.batch = 3; },
        +[](SsdCase& c) { c.shape.qk_heads = 2; }, +[](SsdCase& c) { c.shape.dtype = DType::bfloat16; },
        +[](SsdCase& c) { c.shape.gate_dtype = DType::bfloat16; }, +[](SsdCase& c) { c.options.dt_softplus = true; },
        +[](SsdCase& c) { c.options.dt_min = 0.25; }, +[](SsdCase& c) { c.options.dt_max = 0.25; },
        +[](SsdCase& c) { c.options.chunk_size = 3; }}) {
    SsdCase changed = good_ssd_case();
    change(changed);
    const SsdProblem other(changed);
    const SsdPlan step_of_other = ssd_plan(other.step(other.forward.last_state));
    expect_sentence(refusal([&] { ssd_forward(f, ssd_plan(other.forward), scratch(0, enough)); }), "plan");
    expect_sentence(refusal([&] { ssd_backward(b, ssd_plan(other.backward), scratch(0, enough)); }), "plan");
    expect_sentence(refusal([&] { ssd_step(s, step_of_other, scratch(0, enough)); }), "plan");
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
  ssd_forward(f, forward_plan, scratch(0, forward_plan.scratch_bytes));
  ssd_backward(b, backward_plan, scratch(0, backward_plan.scratch_bytes));
}

// ---------------------------------------------------------------- what must be accepted

TEST(SsdValidationSmall, UnusualButGoodArgumentsAreAccepted) {
  const SsdProblem problem(good_ssd_case());
  const auto accepted = [](auto args, const auto& change) {
    change(args);
    EXPECT_NO_THROW(run_operation(args));
  };
  accepted(problem.forward, [](SsdForward& a) {  // broadcast inputs, as Mamba-2 has A, D and dt_bias
    a.x.strides[1] = a.dt.strides[2] = a.A.strides[0] = a.D.strides[1] = a.dt_bias.strides[0] = 0;
  });
  accepted(problem.forward, [](SsdForward& a) {
    a.B.data = static_cast<const float*>(a.B.data) + a.B.strides[0];
    a.B.strides[0] = -a.B.strides[0];
  });
  accepted(problem.forward, [](SsdForward& a) { a.C = a.B; });  // two inputs may be one
  accepted(problem.forward,
           [](SsdForward& a) { a.D = a.z = a.dt_bias = a.initial_state = a.seq_idx = {}, a.ungated = {}; });
  accepted(problem.forward, [](SsdForward& a) { a.last_state = {}; });
  accepted(problem.forward, [](SsdForward& a) { a.ungated = {}; });
  accepted(problem.forward, [](SsdForward& a) { a.options.dt_min = a.options.dt_max = 0.5; });
  accepted(problem.backward, [](SsdBackward& a) { a.dlast_state = {}; });
  accepted(problem.backward, [](SsdBackward& a) { a.dinitial_state = {}; });
  accepted(problem.backward, [](SsdBackward& a) { a.initial_state = {}; });  // a gradient of a state of zeros
  accepted(problem.forward, [](SsdForward& a) {                              // strides of axes of extent 1 mean nothing
    for (TensorView* view : {&a.x, &a.dt, &a.B, &a.C, &a.z, &a.seq_idx}) *view = slice(*view, 0, 0, 1);
    a.y = slice(a.y, 0, 0, 1);
    a.ungated = slice(a.ungated, 0, 0, 1);
    a.initial_state = {};
    a.last_state = {};
    a.y.strides[0] = 0;
    a.x.strides[0] = huge;
  });
}

TEST(SsdValidationSmall, NothingToDoIsDone) {
  for (const auto change : {+[](SsdCase& c) { c.shape.tokens = 0; }, +[](SsdCase& c) { c.shape.batch = 0; }}) {
    SsdCase c = good_ssd_case();
    change(c);
    SsdProblem problem(c);
    const Snapshot results = run_both(problem);
    EXPECT_EQ(results.at("dA"), Values(2, 0));
    EXPECT_EQ(results.at("dD"), Values(6, 0));
    EXPECT_EQ(results.at("ddt_bias"), Values(2, 0));
    const SsdStep step = problem.step(problem.forward.last_state);
    EXPECT_NO_THROW(ssd_step(step));
    if (c.shape.batch == 0) continue;
    EXPECT_TRUE(same_bits(results.at("S"), gather(problem.forward.initial_state)));
    EXPECT_TRUE(same_bits(results.at("dS0"), gather(problem.backward.dlast_state)));
  }
}

}  // namespace
}  // namespace tfla::test
