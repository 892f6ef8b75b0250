// The C API of the delta rule over the C++ one: conversion and nothing else.
#include "tfla/tfla_c_delta.h"

#include <cstddef>

#include "api/tfla_c_parts.h"
#include "tfla/delta.h"

namespace tfla::c_api {

template <>
constexpr std::size_t first_size<tfla_delta_options> = 40;
template <>
constexpr std::size_t first_size<tfla_delta_forward_args> = 896;
template <>
constexpr std::size_t first_size<tfla_delta_backward_args> = 1536;
template <>
constexpr std::size_t first_size<tfla_delta_step_args> = 816;

namespace {

DeltaOptions options_of(const tfla_delta_options* given) {
  DeltaOptions options;
  if (given == nullptr) return options;
  const tfla_delta_options o = read(given, "options");
  options.write = enumerator<WriteGate>(o.write);
  options.normalize_qk = o.normalize_qk != 0;
  options.chunk_size = o.chunk_size;
  if (o.has_qk_scale != 0) options.qk_scale = o.qk_scale;
  return options;
}

DeltaForward arguments(const tfla_delta_forward_args* given) {
  const tfla_delta_forward_args a = read(given, "args");
  return {.q = in(a.q),
          .k = in(a.k),
          .v = in(a.v),
          .beta = in(a.beta),
          .g = in(a.g),
          .A_log = in(a.A_log),
          .dt_bias = in(a.dt_bias),
          .h = out(a.h),
          .initial_state = in(a.initial_state),
          .last_state = out(a.last_state),
          .cu_seqlens = in(a.cu_seqlens),
          .options = options_of(a.options)};
}

DeltaBackward arguments(const tfla_delta_backward_args* given) {
  const tfla_delta_backward_args a = read(given, "args");
  return {.q = in(a.q),
          .k = in(a.k),
          .v = in(a.v),
          .beta = in(a.beta),
          .g = in(a.g),
          .A_log = in(a.A_log),
          .dt_bias = in(a.dt_bias),
          .dh = in(a.dh),
          .dq = out(a.dq),
          .dk = out(a.dk),
          .dv = out(a.dv),
          .dbeta = out(a.dbeta),
          .dg = out(a.dg),
          .dA_log = out(a.dA_log),
          .ddt_bias = out(a.ddt_bias),
          .initial_state = in(a.initial_state),
          .dlast_state = in(a.dlast_state),
          .dinitial_state = out(a.dinitial_state),
          .cu_seqlens = in(a.cu_seqlens),
          .options = options_of(a.options)};
}

DeltaStep arguments(const tfla_delta_step_args* given) {
  const tfla_delta_step_args a = read(given, "args");
  return {.q = in(a.q),
          .k = in(a.k),
          .v = in(a.v),
          .beta = in(a.beta),
          .g = in(a.g),
          .A_log = in(a.A_log),
          .dt_bias = in(a.dt_bias),
          .h = out(a.h),
          .state = out(a.state),
          .slots = in(a.slots),
          .options = options_of(a.options)};
}

}  // namespace

}  // namespace tfla::c_api

using namespace tfla::c_api;  // NOLINT(google-build-using-namespace): what follows is C's

extern "C" {

tfla_status tfla_delta_forward(const tfla_delta_forward_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::delta_forward(arguments(args), execution_of(execution)); });
}
tfla_status tfla_delta_backward(const tfla_delta_backward_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::delta_backward(arguments(args), execution_of(execution)); });
}
tfla_status tfla_delta_step(const tfla_delta_step_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::delta_step(arguments(args), execution_of(execution)); });
}

}  // extern "C"
