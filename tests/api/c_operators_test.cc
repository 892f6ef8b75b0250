// The C API of the operators besides the mLSTM gives what the C++ API gives, bit for bit, and refuses what it refuses
// in the same words.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/delta/problem.h"
#include "tests/ssd/problem.h"
#include "tfla/tfla_c_delta.h"
#include "tfla/tfla_c_ssd.h"

namespace tfla::test {
namespace {

tfla_tensor c(const TensorView& view) {
  tfla_tensor tensor{};
  tensor.data = const_cast<void*>(view.data);
  tensor.dtype = static_cast<std::int32_t>(view.dtype);
  tensor.rank = view.rank;
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.strides.begin(), view.strides.end(), tensor.strides);
  return tensor;
}

tfla_delta_options c(const DeltaOptions& options) {
  return {.struct_size = sizeof(tfla_delta_options),
          .write = static_cast<std::int32_t>(options.write),
          .normalize_qk = options.normalize_qk ? 1 : 0,
          .chunk_size = options.chunk_size,
          .has_qk_scale = options.qk_scale ? 1 : 0,
          .reserved = 0,
          .qk_scale = options.qk_scale.value_or(-7)};  // not to be looked at
}

tfla_delta_forward_args c(const DeltaForward& a, const tfla_delta_options* options) {
  return {.struct_size = sizeof(tfla_delta_forward_args),
          .options = options,
          .q = c(a.q),
          .k = c(a.k),
          .v = c(a.v),
          .beta = c(a.beta),
          .g = c(a.g),
          .A_log = c(a.A_log),
          .dt_bias = c(a.dt_bias),
          .h = c(a.h),
          .initial_state = c(a.initial_state),
          .last_state = c(a.last_state),
          .cu_seqlens = c(a.cu_seqlens)};
}

tfla_delta_backward_args c(const DeltaBackward& a, const tfla_delta_options* options) {
  return {.struct_size = sizeof(tfla_delta_backward_args),
          .options = options,
          .q = c(a.q),
          .k = c(a.k),
          .v = c(a.v),
          .beta = c(a.beta),
          .g = c(a.g),
          .A_log = c(a.A_log),
          .dt_bias = c(a.dt_bias),
          .dh = c(a.dh),
          .dq = c(a.dq),
          .dk = c(a.dk),
          .dv = c(a.dv),
          .dbeta = c(a.dbeta),
          .dg = c(a.dg),
          .dA_log = c(a.dA_log),
          .ddt_bias = c(a.ddt_bias),
          .initial_state = c(a.initial_state),
          .dlast_state = c(a.dlast_state),
          .dinitial_state = c(a.dinitial_state),
          .cu_seqlens = c(a.cu_seqlens)};
}

// Every option away from its default in some row.
std::vector<DeltaCase> delta_cases() {
  DeltaCase plain;
  plain.shape = {.batch = 2, .tokens = 70, .qk_heads = 2, .heads = 4, .dqk = 8, .dhv = 12};
  plain.initial_state = plain.last_state_grad = true;
  DeltaCase none = plain, gates = plain, packed = plain;
  none.decay = Decay::none;
  none.initial_state = none.last_state_grad = false;
  gates.decay = Decay::biased;
  gates.options = {.write = WriteGate::twice_sigmoid, .normalize_qk = true, .qk_scale = 0.3, .chunk_size = 16};
  packed.shape.batch = 1;
  packed.cu_seqlens = {0, 40, 41, 66};
  packed.options.write = WriteGate::sigmoid;
  return {plain, none, gates, packed};
}

TEST(CApiDeltaSmall, ForwardAndBackwardAreThoseOfCpp) {
  for (const DeltaCase& description : delta_cases()) {
    SCOPED_TRACE(label(description));
    DeltaProblem problem(description);
    const tfla_delta_options options = c(description.options);
    const Snapshot expected = run_both(problem);
    problem.poison();
    const tfla_delta_forward_args forward = c(problem.forward, &options);
    ASSERT_EQ(tfla_delta_forward(&forward, nullptr), TFLA_OK) << tfla_last_error();
    Snapshot found = snapshot(outputs(problem.forward));
    problem.poison();
    const tfla_delta_backward_args backward = c(problem.backward, &options);
    ASSERT_EQ(tfla_delta_backward(&backward, nullptr), TFLA_OK) << tfla_last_error();
    found.merge(snapshot(outputs(problem.backward)));
    EXPECT_TRUE(same_bits(found, expected));
  }
}

TEST(CApiDeltaSmall, StepIsThatOfCpp) {
  DeltaCase description = delta_cases()[2];
  description.in_place = true;
  DeltaProblem problem(description);
  const DeltaForward& f = problem.forward;
  const std::array<std::int64_t, 2> slots{1, -1};
  const DeltaStep args{.q = f.q,
                       .k = f.k,
                       .v = f.v,
                       .beta = f.beta,
                       .g = f.g,
                       .A_log = f.A_log,
                       .dt_bias = f.dt_bias,
                       .h = f.h,
                       .state = f.last_state,
                       .slots = {slots.data(), DType::int64, {2}},
                       .options = description.options};
  problem.poison();
  delta_step(args);
  const Snapshot expected = snapshot(outputs(args));
  problem.poison();
  const tfla_delta_options options = c(args.options);
  const tfla_delta_step_args twin{.struct_size = sizeof(tfla_delta_step_args),
                                  .options = &options,
                                  .q = c(args.q),
                                  .k = c(args.k),
                                  .v = c(args.v),
                                  .beta = c(args.beta),
                                  .g = c(args.g),
                                  .A_log = c(args.A_log),
                                  .dt_bias = c(args.dt_bias),
                                  .h = c(args.h),
                                  .state = c(args.state),
                                  .slots = c(args.slots)};
  ASSERT_EQ(tfla_delta_step(&twin, nullptr), TFLA_OK) << tfla_last_error();
  EXPECT_TRUE(same_bits(snapshot(outputs(args)), expected));
}

TEST(CApiDeltaSmall, WhatIsRefusedIsSaid) {
  DeltaProblem problem(delta_cases()[0]);
  tfla_delta_options options = c(DeltaOptions{});
  const auto sentence = [&](const tfla_delta_forward_args& args) {
    EXPECT_EQ(tfla_delta_forward(&args, nullptr), TFLA_INVALID_ARGUMENT);
    return std::string(tfla_last_error());
  };
  tfla_delta_forward_args args = c(problem.forward, &options);
  args.k.shape[3] += 1;
  EXPECT_TRUE(sentence(args).starts_with("tfla: k has shape"));
  args = c(problem.forward, &options);
  args.struct_size = 8;
  EXPECT_TRUE(sentence(args).starts_with("tfla: args->struct_size is 8"));
  args = c(problem.forward, &options);
  options.write = 3;
  EXPECT_TRUE(sentence(args).starts_with("tfla: options.write is not one of"));
  EXPECT_EQ(tfla_delta_step(nullptr, nullptr), TFLA_INVALID_ARGUMENT);
  EXPECT_STREQ(tfla_last_error(), "tfla: args is NULL");
}

// ---------------------------------------------------------------- the state space dual

tfla_ssd_options c(const SsdOptions& options) {
  const bool has_most = std::isfinite(options.dt_max);
  return {.struct_size = sizeof(tfla_ssd_options),
          .dt_softplus = options.dt_softplus ? 1 : 0,
          .has_dt_max = has_most ? 1 : 0,
          .dt_min = options.dt_min,
          .dt_max = has_most ? options.dt_max : -7,  // not to be looked at
          .chunk_size = options.chunk_size};
}

tfla_ssd_forward_args c(const SsdForward& a, const tfla_ssd_options* options) {
  return {.struct_size = sizeof(tfla_ssd_forward_args),
          .options = options,
          .x = c(a.x),
          .dt = c(a.dt),
          .A = c(a.A),
          .B = c(a.B),
          .C = c(a.C),
          .D = c(a.D),
          .z = c(a.z),
          .dt_bias = c(a.dt_bias),
          .y = c(a.y),
          .ungated = c(a.ungated),
          .initial_state = c(a.initial_state),
          .last_state = c(a.last_state),
          .cu_seqlens = c(a.cu_seqlens),
          .seq_idx = c(a.seq_idx)};
}

tfla_ssd_backward_args c(const SsdBackward& a, const tfla_ssd_options* options) {
  return {.struct_size = sizeof(tfla_ssd_backward_args),
          .options = options,
          .x = c(a.x),
          .dt = c(a.dt),
          .A = c(a.A),
          .B = c(a.B),
          .C = c(a.C),
          .D = c(a.D),
          .z = c(a.z),
          .dt_bias = c(a.dt_bias),
          .ungated = c(a.ungated),
          .dy = c(a.dy),
          .dx = c(a.dx),
          .ddt = c(a.ddt),
          .dA = c(a.dA),
          .dB = c(a.dB),
          .dC = c(a.dC),
          .dD = c(a.dD),
          .dz = c(a.dz),
          .ddt_bias = c(a.ddt_bias),
          .initial_state = c(a.initial_state),
          .dlast_state = c(a.dlast_state),
          .dinitial_state = c(a.dinitial_state),
          .cu_seqlens = c(a.cu_seqlens),
          .seq_idx = c(a.seq_idx)};
}

tfla_ssd_step_args c(const SsdStep& a, const tfla_ssd_options* options) {
  return {.struct_size = sizeof(tfla_ssd_step_args),
          .options = options,
          .x = c(a.x),
          .dt = c(a.dt),
          .A = c(a.A),
          .B = c(a.B),
          .C = c(a.C),
          .D = c(a.D),
          .z = c(a.z),
          .dt_bias = c(a.dt_bias),
          .y = c(a.y),
          .state = c(a.state),
          .slots = c(a.slots)};
}

std::vector<SsdCase> ssd_cases() {
  SsdCase plain;
  plain.shape = {.batch = 2, .tokens = 70, .qk_heads = 2, .heads = 4, .dqk = 8, .dhv = 12};
  SsdCase all = plain, packed = plain;
  all.skip = Skip::per_channel;
  all.z = all.dt_bias = all.initial_state = all.last_state_grad = true;
  all.seq_idx = testkit::Numbers::int32;
  all.options = {.dt_softplus = true, .dt_min = 1.0 / 32, .dt_max = 1.0 / 16, .chunk_size = 16};
  packed.shape.batch = 1;
  packed.cu_seqlens = {0, 40, 41, 66};
  packed.skip = Skip::per_head;
  return {plain, all, packed};
}

TEST(CApiSsdSmall, ForwardAndBackwardAreThoseOfCpp) {
  for (const SsdCase& description : ssd_cases()) {
    SCOPED_TRACE(label(description));
    SsdProblem problem(description);
    const tfla_ssd_options options = c(description.options);
    const Snapshot expected = run_both(problem);
    problem.poison_forward();
    const tfla_ssd_forward_args forward = c(problem.forward, &options);
    ASSERT_EQ(tfla_ssd_forward(&forward, nullptr), TFLA_OK) << tfla_last_error();
    Snapshot found = snapshot(outputs(problem.forward));
    problem.poison_backward();
    const tfla_ssd_backward_args backward = c(problem.backward, &options);
    ASSERT_EQ(tfla_ssd_backward(&backward, nullptr), TFLA_OK) << tfla_last_error();
    found.merge(snapshot(outputs(problem.backward)));
    EXPECT_TRUE(same_bits(found, expected));
  }
}

TEST(CApiSsdSmall, StepIsThatOfCpp) {
  SsdCase description = ssd_cases()[1];
  description.seq_idx = testkit::Numbers::none;
  description.in_place = true;
  SsdProblem problem(description);
  const std::array<std::int64_t, 2> slots{1, -1};
  SsdStep args = problem.step(problem.forward.last_state);
  args.slots = {slots.data(), DType::int64, {2}};
  problem.poison_forward();
  ssd_step(args);
  const Snapshot expected = snapshot(outputs(args));
  problem.poison_forward();
  const tfla_ssd_options options = c(args.options);
  const tfla_ssd_step_args twin = c(args, &options);
  ASSERT_EQ(tfla_ssd_step(&twin, nullptr), TFLA_OK) << tfla_last_error();
  EXPECT_TRUE(same_bits(snapshot(outputs(args)), expected));
}

TEST(CApiSsdSmall, WhatIsRefusedIsSaid) {
  SsdProblem problem(ssd_cases()[0]);
  tfla_ssd_options options = c(SsdOptions{});
  const auto sentence = [&](const tfla_ssd_forward_args& args) {
    EXPECT_EQ(tfla_ssd_forward(&args, nullptr), TFLA_INVALID_ARGUMENT);
    return std::string(tfla_last_error());
  };
  tfla_ssd_forward_args args = c(problem.forward, &options);
  args.B.shape[3] += 1;
  EXPECT_NE(sentence(args).find("has shape"), std::string::npos);
  args = c(problem.forward, &options);
  args.struct_size = 8;
  EXPECT_TRUE(sentence(args).starts_with("tfla: args->struct_size is 8"));
  args = c(problem.forward, &options);
  options.dt_min = -1;
  EXPECT_TRUE(sentence(args).starts_with("tfla: options.dt_min is -1"));
}

}  // namespace
}  // namespace tfla::test
