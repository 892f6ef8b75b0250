// The C API over the C++ one: conversion and nothing else. What is wrong with a call is found by the C++ API.
#include "tfla/tfla_c.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <type_traits>

#include "tfla/tfla.h"

struct tfla_plan {
  tfla::Plan plan;
};

namespace {

// ---------------------------------------------------------------- errors

// In place of a string, which would have to allocate in order to say that there is no memory.
thread_local std::array<char, 1024> last_error{};

tfla_status fail(tfla_status status, const char* sentence) noexcept {
  const std::size_t length = std::min(std::strlen(sentence), last_error.size() - 1);
  std::copy_n(sentence, length, last_error.begin());
  last_error[length] = '\0';
  return status;
}

template <class Call>
tfla_status guarded(const Call& call) noexcept {
  try {
    call();
    return TFLA_OK;
  } catch (const tfla::InvalidArgument& error) {
    return fail(TFLA_INVALID_ARGUMENT, error.what());
  } catch (const tfla::Unavailable& error) {
    return fail(TFLA_UNAVAILABLE, error.what());
  } catch (const std::bad_alloc&) {
    return fail(TFLA_OUT_OF_MEMORY, "tfla: there is not enough memory for this call");
  } catch (const std::exception& error) {
    return fail(TFLA_FAILED, error.what());
  } catch (...) {
    return fail(TFLA_FAILED, "tfla: this call failed for a reason that is not known");
  }
}

// ---------------------------------------------------------------- structs that may grow

// Sizes of the first version: no caller has less. A field that is added later leaves them as they are.
template <class Struct>
constexpr std::size_t first_size = 0;
template <>
constexpr std::size_t first_size<tfla_mlstm_options> = 72;
template <>
constexpr std::size_t first_size<tfla_execution> = 32;
template <>
constexpr std::size_t first_size<tfla_mlstm_forward_args> = 1072;
template <>
constexpr std::size_t first_size<tfla_mlstm_backward_args> = 1552;
template <>
constexpr std::size_t first_size<tfla_mlstm_step_args> = 816;

template <class Struct>
Struct read(const Struct* given, const char* name) {
  static_assert(sizeof(Struct) >= first_size<Struct> && first_size<Struct> != 0 && std::is_trivial_v<Struct>);
  if (given == nullptr) throw tfla::InvalidArgument(fmt::format("tfla: {} is NULL", name));
  const std::size_t size = given->struct_size;
  if (size < first_size<Struct>) {
    throw tfla::InvalidArgument(fmt::format("tfla: {}->struct_size is {}; it must be sizeof *{}, which is {} here",
                                            name, size, name, sizeof(Struct)));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min(size, sizeof(Struct)), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    throw tfla::InvalidArgument(
        fmt::format("tfla: {} sets fields that tfla {} does not know; its struct_size is {}, here it is {}", name,
                    tfla::version(), size, sizeof(Struct)));
  }
  Struct known{};
  std::memcpy(&known, given, std::min(size, sizeof(Struct)));
  return known;
}

// A number that is none of the enumeration's stays none of them, for validation to refuse.
template <class Enumeration>
Enumeration enumerator(std::int32_t value) {
  return static_cast<Enumeration>(value < 0 || value > 255 ? 255 : value);
}

template <class View>
View view(const tfla_tensor& tensor) {
  View view;
  view.data = tensor.data;
  view.dtype = enumerator<tfla::DType>(tensor.dtype);
  view.rank = tensor.rank;
  std::copy_n(std::begin(tensor.shape), View::max_rank, view.shape.begin());
  std::copy_n(std::begin(tensor.strides), View::max_rank, view.strides.begin());
  return view;
}
tfla::TensorView in(const tfla_tensor& tensor) { return view<tfla::TensorView>(tensor); }
tfla::MutableTensorView out(const tfla_tensor& tensor) { return view<tfla::MutableTensorView>(tensor); }
tfla::MlstmState in(const tfla_mlstm_state& state) { return {in(state.C), in(state.n), in(state.m)}; }
tfla::MutableMlstmState out(const tfla_mlstm_state& state) { return {out(state.C), out(state.n), out(state.m)}; }
tfla::MlstmStateGrad in(const tfla_mlstm_state_grad& grad) { return {in(grad.C), in(grad.n)}; }
tfla::MutableMlstmStateGrad out(const tfla_mlstm_state_grad& grad) { return {out(grad.C), out(grad.n)}; }

void set_keep(tfla::MlstmOptions& options, std::int32_t keep) {
  if (keep < TFLA_KEEP_NOTHING || keep > TFLA_KEEP_STATES) {
    throw tfla::InvalidArgument(fmt::format("tfla: options.keep is {}; it must be one of TFLA_KEEP_...", keep));
  }
  options.keep = static_cast<tfla::Keep>(keep);
}

tfla::MlstmOptions options_of(const tfla_mlstm_options* given) {
  tfla::MlstmOptions options;
  if (given == nullptr) return options;
  const tfla_mlstm_options o = read(given, "options");
  options.gate = enumerator<tfla::InputGate>(o.gate);
  options.normalizer = enumerator<tfla::Normalizer>(o.normalizer);
  options.formulation = enumerator<tfla::Formulation>(o.formulation);
  options.chunk_size = o.chunk_size;
  options.exact_normalizer_grad = o.exact_normalizer_grad != 0;
  if (o.has_eps != 0) options.eps = o.eps;
  if (o.has_qk_scale != 0) options.qk_scale = o.qk_scale;
  if (o.has_soft_cap != 0) options.soft_cap = o.soft_cap;
  set_keep(options, o.keep);
  return options;
}

tfla::Execution execution_of(const tfla_execution* given) {
  if (given == nullptr) return {};
  const tfla_execution e = read(given, "execution");
  return {.device = enumerator<tfla::Device>(e.device),
          .threads = e.threads,
          .stream = e.stream,
          .portable = e.portable != 0};
}

// ---------------------------------------------------------------- arguments

tfla::MlstmForward arguments(const tfla_mlstm_forward_args* given) {
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

tfla::MlstmBackward arguments(const tfla_mlstm_backward_args* given) {
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

tfla::MlstmStep arguments(const tfla_mlstm_step_args* given) {
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
    if (plan == nullptr) throw tfla::InvalidArgument("tfla: plan is NULL; it must point to where the plan goes");
    *plan = std::make_unique<tfla_plan>(tfla_plan{tfla::plan(arguments(args), execution_of(execution))}).release();
  });
}

const tfla::Plan& plan_of(const tfla_plan* plan) {
  if (plan == nullptr) throw tfla::InvalidArgument("tfla: plan is NULL");
  return plan->plan;
}

std::span<std::byte> bytes_of(void* memory, std::size_t count) { return {static_cast<std::byte*>(memory), count}; }

}  // namespace

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
