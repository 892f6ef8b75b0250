#include "api/validate_delta.h"

#include <fmt/format.h>

#include <cmath>

#include "api/validate.h"
#include "api/validate_parts.h"
#include "core/alignment.h"
#include "core/checks.h"

namespace tfla {

namespace {

void check_gate(const char* name, const TensorView& view, const DeltaShape& shape) {
  check_tensor(name, view, {shape.batch, shape.tokens, shape.heads}, "(B,T,H)", LastAxis::any);
  check_dtype(name, view, floats);
}

// q, k, v and the gates: what all three operations read. The shape is that of a dense batch.
template <class Args>
DeltaShape check_inputs(const Args& args) {
  check_rank("q", args.q, 4, "(B,T,Hqk,dqk)");
  check_rank("v", args.v, 4, "(B,T,H,dhv)");
  check_dtype("q", args.q, floats);
  check_rank("beta", args.beta, 3, "(B,T,H)");
  check_dtype("beta", args.beta, floats);
  const DeltaShape shape{.batch = args.q.shape[0],
                         .tokens = args.q.shape[1],
                         .qk_heads = args.q.shape[2],
                         .heads = args.v.shape[2],
                         .dqk = args.q.shape[3],
                         .dhv = args.v.shape[3],
                         .sequences = args.q.shape[0],
                         .longest = args.q.shape[1],
                         .dtype = args.q.dtype,
                         .gate_dtype = args.beta.dtype};
  validate_shape(shape);
  check_same_dtype("k", args.k, "q", shape.dtype);
  check_same_dtype("v", args.v, "q", shape.dtype);
  check_keys("q", args.q, shape);
  check_keys("k", args.k, shape);
  check_values("v", args.v, shape);
  check_gate("beta", args.beta, shape);
  if (args.g.given()) check_gate("g", args.g, shape);
  if (args.A_log.given() && !args.g.given()) refuse("tfla: A_log is given without g, which it says how to read");
  if (args.dt_bias.given() && !args.A_log.given()) refuse("tfla: dt_bias is given without A_log; they go together");
  if (args.A_log.given()) check_per_head("A_log", args.A_log, shape);
  if (args.dt_bias.given()) check_per_head("dt_bias", args.dt_bias, shape);
  return shape;
}

void check_optional_state(const char* name, const TensorView& view, const DeltaShape& shape) {
  if (view.given()) check_state_C(name, view, shape.sequences, shape);
}

template <class Args, class... Views>
bool all_mapped(const Args& args, const Views&... views) {
  const std::int64_t packed_tokens = args.cu_seqlens.given() ? args.q.shape[1] : 0;
  return (has_tensor_map(views, packed_tokens) && ...);
}

template <class Args>
void add_inputs(OverlapCheck& check, const Args& args) {
  check.input("q", args.q);
  check.input("k", args.k);
  check.input("v", args.v);
  check.input("beta", args.beta);
  check.input("g", args.g);
  check.input("A_log", args.A_log);
  check.input("dt_bias", args.dt_bias);
}

}  // namespace

void validate_options(const DeltaOptions& options, Operation operation) {
  if (operation > Operation::step) refuse("tfla: operation is not one of forward, backward and step");
  if (options.write > WriteGate::twice_sigmoid) {
    refuse("tfla: options.write is not one of plain, sigmoid and twice_sigmoid");
  }
  if (options.qk_scale && !std::isfinite(*options.qk_scale)) {
    refuse(fmt::format("tfla: options.qk_scale is {}; it must be finite", *options.qk_scale));
  }
  if (options.chunk_size < 0) {
    refuse(fmt::format("tfla: options.chunk_size is {}; it must be positive, or 0 to let the plan choose",
                       options.chunk_size));
  }
}

DeltaShape validate(const DeltaForward& args, Device device) {
  validate_options(args.options, Operation::forward);
  DeltaShape shape = check_inputs(args);
  check_values("h", args.h, shape);
  check_cu_seqlens(args.cu_seqlens, device, shape);
  check_optional_state("initial_state", args.initial_state, shape);
  check_optional_state("last_state", args.last_state, shape);
  shape.aligned = device != Device::cuda || all_mapped(args, args.q, args.k, args.v, args.h);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("initial_state", args.initial_state);
  check.output("h", args.h);
  check.output_in_place_of("last_state", args.last_state, "initial_state");
  return shape;
}

DeltaShape validate(const DeltaBackward& args, Device device) {
  validate_options(args.options, Operation::backward);
  DeltaShape shape = check_inputs(args);
  check_values("dh", args.dh, shape);
  check_keys("dq", args.dq, shape);
  check_keys("dk", args.dk, shape);
  check_values("dv", args.dv, shape);
  check_gate("dbeta", args.dbeta, shape);
  check_same_dtype("dbeta", args.dbeta, "beta", args.beta.dtype);
  if (has_gradient("dg", args.dg, "g", args.g)) {
    check_gate("dg", args.dg, shape);
    check_same_dtype("dg", args.dg, "g", args.g.dtype);
  }
  if (has_gradient("dA_log", args.dA_log, "A_log", args.A_log)) {
    check_per_head("dA_log", args.dA_log, shape);
    check_same_dtype("dA_log", args.dA_log, "A_log", args.A_log.dtype);
  }
  if (has_gradient("ddt_bias", args.ddt_bias, "dt_bias", args.dt_bias)) {
    check_per_head("ddt_bias", args.ddt_bias, shape);
    check_same_dtype("ddt_bias", args.ddt_bias, "dt_bias", args.dt_bias.dtype);
  }
  check_cu_seqlens(args.cu_seqlens, device, shape);
  check_optional_state("initial_state", args.initial_state, shape);
  check_optional_state("dlast_state", args.dlast_state, shape);
  check_optional_state("dinitial_state", args.dinitial_state, shape);
  shape.aligned = device != Device::cuda || all_mapped(args, args.q, args.k, args.v, args.dh, args.dv);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("dh", args.dh);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("initial_state", args.initial_state);
  check.input("dlast_state", args.dlast_state);
  check.output("dq", args.dq);
  check.output("dk", args.dk);
  check.output("dv", args.dv);
  check.output("dbeta", args.dbeta);
  check.output("dg", args.dg);
  check.output("dA_log", args.dA_log);
  check.output("ddt_bias", args.ddt_bias);
  check.output("dinitial_state", args.dinitial_state);
  return shape;
}

DeltaShape validate(const DeltaStep& args, Device device) {
  validate_options(args.options, Operation::step);
  const DeltaShape shape = check_inputs(args);
  check_values("h", args.h, shape);
  check_rank("state", args.state, 4, "(S,H,dqk,dhv)");
  check_state_C("state", args.state, args.state.shape[0], shape);
  check_slots(args.slots, device, shape, "state", args.state.shape[0]);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("slots", args.slots);
  check.output("h", args.h);
  check.output("state", args.state);
  return shape;
}

}  // namespace tfla
