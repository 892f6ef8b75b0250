// The C API of the state space dual over the C++ one: conversion and nothing else.
#include "tfla/tfla_c_ssd.h"

#include <cstddef>

#include "api/tfla_c_parts.h"
#include "tfla/ssd.h"

namespace tfla::c_api {

template <>
constexpr std::size_t first_size<tfla_ssd_options> = 40;
template <>
constexpr std::size_t first_size<tfla_ssd_forward_args> = 1136;
template <>
constexpr std::size_t first_size<tfla_ssd_backward_args> = 1856;
template <>
constexpr std::size_t first_size<tfla_ssd_step_args> = 896;

namespace {

SsdOptions options_of(const tfla_ssd_options* given) {
  SsdOptions options;
  if (given == nullptr) return options;
  const tfla_ssd_options o = read(given, "options");
  options.dt_softplus = o.dt_softplus != 0;
  options.dt_min = o.dt_min;
  if (o.has_dt_max != 0) options.dt_max = o.dt_max;
  options.chunk_size = o.chunk_size;
  return options;
}

SsdForward arguments(const tfla_ssd_forward_args* given) {
  const tfla_ssd_forward_args a = read(given, "args");
  return {.x = in(a.x),
          .dt = in(a.dt),
          .A = in(a.A),
          .B = in(a.B),
          .C = in(a.C),
          .D = in(a.D),
          .z = in(a.z),
          .dt_bias = in(a.dt_bias),
          .y = out(a.y),
          .ungated = out(a.ungated),
          .initial_state = in(a.initial_state),
          .last_state = out(a.last_state),
          .cu_seqlens = in(a.cu_seqlens),
          .seq_idx = in(a.seq_idx),
          .options = options_of(a.options)};
}

SsdBackward arguments(const tfla_ssd_backward_args* given) {
  const tfla_ssd_backward_args a = read(given, "args");
  return {.x = in(a.x),
          .dt = in(a.dt),
          .A = in(a.A),
          .B = in(a.B),
          .C = in(a.C),
          .D = in(a.D),
          .z = in(a.z),
          .dt_bias = in(a.dt_bias),
          .ungated = in(a.ungated),
          .dy = in(a.dy),
          .dx = out(a.dx),
          .ddt = out(a.ddt),
          .dA = out(a.dA),
          .dB = out(a.dB),
          .dC = out(a.dC),
          .dD = out(a.dD),
          .dz = out(a.dz),
          .ddt_bias = out(a.ddt_bias),
          .initial_state = in(a.initial_state),
          .dlast_state = in(a.dlast_state),
          .dinitial_state = out(a.dinitial_state),
          .cu_seqlens = in(a.cu_seqlens),
          .seq_idx = in(a.seq_idx),
          .options = options_of(a.options)};
}

SsdStep arguments(const tfla_ssd_step_args* given) {
  const tfla_ssd_step_args a = read(given, "args");
  return {.x = in(a.x),
          .dt = in(a.dt),
          .A = in(a.A),
          .B = in(a.B),
          .C = in(a.C),
          .D = in(a.D),
          .z = in(a.z),
          .dt_bias = in(a.dt_bias),
          .y = out(a.y),
          .state = out(a.state),
          .slots = in(a.slots),
          .options = options_of(a.options)};
}

}  // namespace

}  // namespace tfla::c_api

using namespace tfla::c_api;  // NOLINT(google-build-using-namespace): what follows is C's

extern "C" {

tfla_status tfla_ssd_forward(const tfla_ssd_forward_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::ssd_forward(arguments(args), execution_of(execution)); });
}
tfla_status tfla_ssd_backward(const tfla_ssd_backward_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::ssd_backward(arguments(args), execution_of(execution)); });
}
tfla_status tfla_ssd_step(const tfla_ssd_step_args* args, const tfla_execution* execution) {
  return guarded([&] { tfla::ssd_step(arguments(args), execution_of(execution)); });
}

}  // extern "C"
