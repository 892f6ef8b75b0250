// The C API over the C++ one: conversion and nothing else. What is wrong with a call is found by the C++ API.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "api/tfla_c_parts.h"
#include "tfla/tfla.h"

struct tfla_plan {
  tfla::Plan plan;
};

namespace tfla::c_api {

namespace {
// In place of a string, which would have to allocate in order to say that there is no memory.
thread_local std::array<char, 1024> last_error{};
}  // namespace

tfla_status fail(tfla_status status, const char* sentence) noexcept {
  const std::size_t length = std::min(std::strlen(sentence), last_error.size() - 1);
  std::copy_n(sentence, length, last_error.begin());
  last_error[length] = '\0';
  return status;
}

template <>
constexpr std::size_t first_size<tfla_mlstm_options> = 72;
template <>
constexpr std::size_t first_size<tfla_mlstm_forward_args> = 1072;
template <>
constexpr std::size_t first_size<tfla_mlstm_backward_args> = 1552;
template <>
constexpr std::size_t first_size<tfla_mlstm_step_args> = 816;

static MlstmState in(const tfla_mlstm_state& state) { return {in(state.C), in(state.n), in(state.m)}; }
static MutableMlstmState out(const tfla_mlstm_state& state) { return {out(state.C), out(state.n), out(state.m)}; }
static MlstmStateGrad in(const tfla_mlstm_state_grad& grad) { return {in(grad.C), in(grad.n)}; }
static MutableMlstmStateGrad out(const tfla_mlstm_state_grad& grad) { return {out(grad.C), out(grad.n)}; }

namespace {

void set_keep(MlstmOptions& options, std::int32_t keep) {
  if (keep < TFLA_KEEP_NOTHING || keep > TFLA_KEEP_STATES) {
    throw InvalidArgument(fmt::format("tfla: options.keep is {}; it must be one of TFLA_KEEP_...", keep));
  }
  options.keep = static_cast<Keep>(keep);
}

MlstmOptions options_of(const tfla_mlstm_options* given) {
  MlstmOptions options;
  if (given == nullptr) return options;
  const tfla_mlstm_options o = read(given, "options");
  options.gate = enumerator<InputGate>(o.gate);
  options.normalizer = enumerator<Normalizer>(o.normalizer);
  options.formulation = enumerator<Formulation>(o.formulation);
  options.chunk_size = o.chunk_size;
  options.exact_normalizer_grad = o.exact_normalizer_grad != 0;
  if (o.has_eps != 0) options.eps = o.eps;
  if (o.has_qk_scale != 0) options.qk_scale = o.qk_scale;
  if (o.has_soft_cap != 0) options.soft_cap = o.soft_cap;
  set_keep(options, o.keep);
  return options;
}

// ---------------------------------------------------------------- arguments

MlstmForward arguments(const tfla_mlstm_forward_args* given) {
  const tfla_mlstm_forward_args a = read(given, "args");
  return {.q = in(a.q),
          .k = in(a.k),
          .v = in(a.v),
          .i = in(a.i),
          .f = in(a.f),
          .h = out(a.h),
          .initial_state = in(a.initial_state),
          .last_state = out(a.last_state),
          .cu_seqlens = in(a.cu_seqlens),
          .saved = {static_cast<std::byte*>(a.saved), a.saved_bytes},
          .options = options_of(a.options)};
}

MlstmBackward arguments(const tfla_mlstm_backward_args* given) {
  const tfla_mlstm_backward_args a = read(given, "args");
  return {.q = in(a.q),
          .k = in(a.k),
          .v = in(a.v),
          .i = in(a.i),
          .f = in(a.f),
          .dh = in(a.dh),
          .dq = out(a.dq),
          .dk = out(a.dk),
          .dv = out(a.dv),
          .di = out(a.di),
          .df = out(a.df),
          .initial_state = in(a.initial_state),
          .dlast_state = in(a.dlast_state),
          .dinitial_state = out(a.dinitial_state),
          .cu_seqlens = in(a.cu_seqlens),
          .saved = {static_cast<const std::byte*>(a.saved), a.saved_bytes},
          .options = options_of(a.options)};
}

MlstmStep arguments(const tfla_mlstm_step_args* given) {
  const tfla_mlstm_step_args a = read(given, "args");
  return {.q = in(a.q),
          .k = in(a.k),
          .v = in(a.v),
          .i = in(a.i),
          .f = in(a.f),
          .h = out(a.h),
          .state = out(a.state),
          .slots = in(a.slots),
          .options = options_of(a.options)};
}

// ---------------------------------------------------------------- what every operation does

template <class Args>
tfla_status make_plan(const Args* args, const tfla_execution* execution, tfla_plan** plan) {
  return guarded([&] {
    if (plan == nullptr) throw InvalidArgument("tfla: plan is NULL; it must point to where the plan goes");
    *plan = std::make_unique<tfla_plan>(tfla_plan{tfla::plan(arguments(args), execution_of(execution))}).release();
  });
}

const Plan& plan_of(const tfla_plan* plan) {
  if (plan == nullptr) throw InvalidArgument("tfla: plan is NULL");
  return plan->plan;
}

std::span<std::byte> bytes_of(void* memory, std::size_t count) { return {static_cast<std::byte*>(memory), count}; }

}  // namespace

}  // namespace tfla::c_api

using namespace tfla::c_api;  // NOLINT(google-build-using-namespace): what follows is C's

extern "C" {

const char* tfla_last_error(void) { return last_error.data(); }
const char* tfla_version(void) { return tfla::version(); }

tfla_tensor tfla_dense(const void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  tfla_tensor tensor{.data = const_cast<void*>(data), .dtype = dtype, .rank = rank, .shape = {}, .strides = {}};
  // Unsigned arithmetic: absurd extents wrap here, and validation refuses them, as it does the rank.
  std::uint64_t stride = 1;
  for (std::int32_t axis = std::min(rank, tfla::TensorView::max_rank) - 1; axis >= 0; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = static_cast<int64_t>(stride);
    stride *= static_cast<std::uint64_t>(shape[axis]);
  }
  return tensor;
}

tfla_status tfla_mlstm_forward(const tfla_mlstm_forward_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::forward(arguments(args), execution_of(execution)); });
}
tfla_status tfla_mlstm_backward(const tfla_mlstm_backward_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::backward(arguments(args), execution_of(execution)); });
}
tfla_status tfla_mlstm_step(const tfla_mlstm_step_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::step(arguments(args), execution_of(execution)); });
}

tfla_status tfla_plan_forward(const tfla_mlstm_forward_args* args, const tfla_execution* execution, tfla_plan** plan) {
  return make_plan(args, execution, plan);
}
tfla_status tfla_plan_backward(const tfla_mlstm_backward_args* args, const tfla_execution* execution,
                               tfla_plan** plan) {
  return make_plan(args, execution, plan);
}
tfla_status tfla_plan_step(const tfla_mlstm_step_args* args, const tfla_execution* execution, tfla_plan** plan) {
  return make_plan(args, execution, plan);
}
void tfla_plan_free(tfla_plan* plan) { delete plan; }

size_t tfla_plan_scratch_bytes(const tfla_plan* plan) { return plan == nullptr ? 0 : plan->plan.scratch_bytes; }
size_t tfla_plan_saved_bytes(const tfla_plan* plan) { return plan == nullptr ? 0 : plan->plan.saved_bytes; }
size_t tfla_plan_describe(const tfla_plan* plan, char* text, size_t bytes) {
  std::size_t length = 0;
  static_cast<void>(guarded([&] {
    const std::string page = describe(plan_of(plan));
    length = page.size();
    if (bytes == 0) return;
    *std::copy_n(page.begin(), std::min(length, bytes - 1), text) = '\0';
  }));
  return length;
}

tfla_status tfla_run_forward(const tfla_mlstm_forward_args* args, const tfla_plan* plan, void* scratch,
                             size_t scratch_bytes, void* stream) {
  return guarded([&] { tfla::forward(arguments(args), plan_of(plan), bytes_of(scratch, scratch_bytes), stream); });
}
tfla_status tfla_run_backward(const tfla_mlstm_backward_args* args, const tfla_plan* plan, void* scratch,
                              size_t scratch_bytes, void* stream) {
  return guarded([&] { tfla::backward(arguments(args), plan_of(plan), bytes_of(scratch, scratch_bytes), stream); });
}
tfla_status tfla_run_step(const tfla_mlstm_step_args* args, const tfla_plan* plan, void* scratch, size_t scratch_bytes,
                          void* stream) {
  return guarded([&] { tfla::step(arguments(args), plan_of(plan), bytes_of(scratch, scratch_bytes), stream); });
}

}  // extern "C"
