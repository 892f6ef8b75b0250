#include "api/validate_ssd.h"

#include <fmt/format.h>

#include <cmath>

#include "api/validate.h"
#include "api/validate_parts.h"
#include "core/alignment.h"
#include "core/checks.h"

namespace tfla {

namespace {

void check_outputs(const char* name, const TensorView& view, const MlstmShape& shape) {
  check_tensor(name, view, {shape.batch, shape.tokens, shape.heads, shape.dhv}, "(B,T,H,P)", LastAxis::contiguous);
  check_same_dtype(name, view, "x", shape.dtype);
}
void check_groups(const char* name, const TensorView& view, const MlstmShape& shape) {
  check_tensor(name, view, {shape.batch, shape.tokens, shape.qk_heads, shape.dqk}, "(B,T,G,S)", LastAxis::contiguous);
  check_same_dtype(name, view, "x", shape.dtype);
}
void check_steps(const char* name, const TensorView& view, const MlstmShape& shape) {
  check_tensor(name, view, {shape.batch, shape.tokens, shape.heads}, "(B,T,H)", LastAxis::any);
}
// D, or its gradient.
void check_skip(const char* name, const TensorView& view, const MlstmShape& shape) {
  if (view.rank == 1) return check_per_head(name, view, shape);
  check_rank(name, view, 2, "(H) or (H,P)");
  check_tensor(name, view, {shape.heads, shape.dhv}, "(H) or (H,P)", LastAxis::any);
  check_dtype(name, view, floats);
}
void check_state(const char* name, const TensorView& view, std::int64_t states, const MlstmShape& shape) {
  if (!view.given()) return;
  check_tensor(name, view, {states, shape.heads, shape.dhv, shape.dqk}, "(N,H,P,S)", LastAxis::any);
  if (view.dtype == state_dtype(shape)) return;
  refuse(fmt::format("tfla: {} has dtype {}; states are {} when x is {}", name, tfla::name(view.dtype),
                     tfla::name(state_dtype(shape)), tfla::name(shape.dtype)));
}

// What the plan calls dqk, dhv and qk_heads has names of its own here.
void check_axes(const MlstmShape& shape) {
  const auto at_least_one = [](const char* axis, std::int64_t value) {
    if (value < 1) refuse(fmt::format("tfla: {} is {}; it must be at least 1", axis, value));
  };
  at_least_one("the number of heads H (axis 2 of x)", shape.heads);
  at_least_one("the head dimension P (axis 3 of x)", shape.dhv);
  at_least_one("the number of groups G (axis 2 of B)", shape.qk_heads);
  at_least_one("the state dimension S (axis 3 of B)", shape.dqk);
  if (shape.heads % shape.qk_heads != 0) {
    refuse(fmt::format("tfla: x has {} heads and B has {} groups; the heads must be a multiple of the groups",
                       shape.heads, shape.qk_heads));
  }
}

// What all three operations read. The shape is that of a dense batch.
template <class Args>
MlstmShape check_inputs(const Args& args) {
  check_rank("x", args.x, 4, "(B,T,H,P)");
  check_rank("B", args.B, 4, "(B,T,G,S)");
  check_rank("dt", args.dt, 3, "(B,T,H)");
  check_dtype("x", args.x, floats);
  check_dtype("dt", args.dt, floats);
  const MlstmShape shape{.batch = args.x.shape[0],
                         .tokens = args.x.shape[1],
                         .qk_heads = args.B.shape[2],
                         .heads = args.x.shape[2],
                         .dqk = args.B.shape[3],
                         .dhv = args.x.shape[3],
                         .sequences = args.x.shape[0],
                         .longest = args.x.shape[1],
                         .dtype = args.x.dtype,
                         .gate_dtype = args.dt.dtype};
  check_axes(shape);
  validate_shape(shape);
  check_outputs("x", args.x, shape);
  check_steps("dt", args.dt, shape);
  check_per_head("A", args.A, shape);
  check_groups("B", args.B, shape);
  check_groups("C", args.C, shape);
  if (args.D.given()) check_skip("D", args.D, shape);
  if (args.z.given()) check_outputs("z", args.z, shape);
  if (args.dt_bias.given()) check_per_head("dt_bias", args.dt_bias, shape);
  return shape;
}

void check_seq_idx(const TensorView& seq_idx, const MlstmShape& shape) {
  if (!seq_idx.given()) return;
  check_tensor("seq_idx", seq_idx, {shape.batch, shape.tokens}, "(B,T)", LastAxis::any);
  check_dtype("seq_idx", seq_idx, integers);
}

template <class Args>
void add_inputs(OverlapCheck& check, const Args& args) {
  check.input("x", args.x);
  check.input("dt", args.dt);
  check.input("A", args.A);
  check.input("B", args.B);
  check.input("C", args.C);
  check.input("D", args.D);
  check.input("z", args.z);
  check.input("dt_bias", args.dt_bias);
}

// Whether rows of what the scan reads and writes lie as the fastest GPU kernels want them. Scratch does where P allows.
template <class... Views>
bool is_aligned(const MlstmShape& shape, const Views&... views) {
  const std::int64_t packed_tokens = shape.packed ? shape.tokens : 0;
  return (has_tensor_map(views, packed_tokens) && ...);
}

}  // namespace

void validate_options(const SsdOptions& options, Operation operation) {
  if (operation > Operation::step) refuse("tfla: operation is not one of forward, backward and step");
  if (!(options.dt_min >= 0)) {
    refuse(fmt::format("tfla: options.dt_min is {}; it must be 0 or more, since dt is a weight", options.dt_min));
  }
  if (!(options.dt_max >= options.dt_min)) {
    refuse(fmt::format("tfla: options.dt_max is {}; it must be at least dt_min, which is {}", options.dt_max,
                       options.dt_min));
  }
  if (options.chunk_size < 0) {
    refuse(fmt::format("tfla: options.chunk_size is {}; it must be positive, or 0 to let the plan choose",
                       options.chunk_size));
  }
}

bool has_aligned_epilogue(const SsdForward& args) {
  const std::int64_t packed_tokens = args.cu_seqlens.given() ? args.x.shape[1] : 0;
  const auto lies_well = [&](const TensorView& view) { return !view.given() || has_tensor_map(view, packed_tokens); };
  return lies_well(args.y) && lies_well(args.z) && lies_well(args.ungated);
}

MlstmShape validate(const SsdForward& args, Device device) {
  validate_options(args.options, Operation::forward);
  MlstmShape shape = check_inputs(args);
  check_outputs("y", args.y, shape);
  if (args.ungated.given()) {
    if (!args.z.given()) refuse("tfla: ungated is given without z; without a gate it is y");
    check_outputs("ungated", args.ungated, shape);
  }
  check_seq_idx(args.seq_idx, shape);
  check_cu_seqlens(args.cu_seqlens, device, shape);
  check_state("initial_state", args.initial_state, shape.sequences, shape);
  check_state("last_state", args.last_state, shape.sequences, shape);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("seq_idx", args.seq_idx);
  check.input("initial_state", args.initial_state);
  check.output("y", args.y);
  check.output("ungated", args.ungated);
  check.output_in_place_of("last_state", args.last_state, "initial_state");
  if (device != Device::cuda) return shape;
  shape.states = shape.packed && (args.initial_state.given() || args.last_state.given());
  shape.aligned = is_aligned(shape, args.x, args.B, args.C, args.ungated.given() ? args.ungated : args.y);
  return shape;
}

MlstmShape validate(const SsdBackward& args, Device device) {
  validate_options(args.options, Operation::backward);
  MlstmShape shape = check_inputs(args);
  if (has_gradient("dz", args.dz, "z", args.z)) {
    check_outputs("dz", args.dz, shape);
    check_outputs("ungated", args.ungated, shape);
  } else if (args.ungated.given()) {
    refuse("tfla: ungated is given without z; without a gate it is y");
  }
  check_outputs("dy", args.dy, shape);
  check_outputs("dx", args.dx, shape);
  check_steps("ddt", args.ddt, shape);
  check_same_dtype("ddt", args.ddt, "dt", args.dt.dtype);
  check_per_head("dA", args.dA, shape);
  check_same_dtype("dA", args.dA, "A", args.A.dtype);
  check_groups("dB", args.dB, shape);
  check_groups("dC", args.dC, shape);
  if (has_gradient("dD", args.dD, "D", args.D)) {
    check_skip("dD", args.dD, shape);
    check_same_dtype("dD", args.dD, "D", args.D.dtype);
    if (args.dD.rank != args.D.rank) refuse("tfla: dD and D have different numbers of axes; they must be equal");
  }
  if (has_gradient("ddt_bias", args.ddt_bias, "dt_bias", args.dt_bias)) {
    check_per_head("ddt_bias", args.ddt_bias, shape);
    check_same_dtype("ddt_bias", args.ddt_bias, "dt_bias", args.dt_bias.dtype);
  }
  check_seq_idx(args.seq_idx, shape);
  check_cu_seqlens(args.cu_seqlens, device, shape);
  check_state("initial_state", args.initial_state, shape.sequences, shape);
  check_state("dlast_state", args.dlast_state, shape.sequences, shape);
  check_state("dinitial_state", args.dinitial_state, shape.sequences, shape);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("ungated", args.ungated);
  check.input("dy", args.dy);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("seq_idx", args.seq_idx);
  check.input("initial_state", args.initial_state);
  check.input("dlast_state", args.dlast_state);
  check.output("dx", args.dx);
  check.output("ddt", args.ddt);
  check.output("dA", args.dA);
  check.output("dB", args.dB);
  check.output("dC", args.dC);
  check.output("dD", args.dD);
  check.output("dz", args.dz);
  check.output("ddt_bias", args.ddt_bias);
  check.output("dinitial_state", args.dinitial_state);
  if (device != Device::cuda) return shape;
  shape.states =
      shape.packed && (args.initial_state.given() || args.dlast_state.given() || args.dinitial_state.given());
  shape.aligned = is_aligned(shape, args.x, args.B, args.C, args.dx, args.dB, args.dC) &&
                  (args.z.given() || is_aligned(shape, args.dy));
  return shape;
}

MlstmShape validate(const SsdStep& args, Device device) {
  validate_options(args.options, Operation::step);
  const MlstmShape shape = check_inputs(args);
  check_outputs("y", args.y, shape);
  check_rank("state", args.state, 4, "(N,H,P,S)");
  const std::int64_t states = args.state.shape[0];
  check_tensor("state", args.state, {states, shape.heads, shape.dhv, shape.dqk}, "(N,H,P,S)", LastAxis::contiguous);
  if (shape.dtype == DType::float64) {
    check_same_dtype("state", args.state, "x", DType::float64);
  } else {
    check_dtype("state", args.state, {DType::float32, DType::bfloat16, DType::float16});
  }
  check_slots(args.slots, device, shape, "state", states);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("slots", args.slots);
  check.output("y", args.y);
  check.output("state", args.state);
  return shape;
}

}  // namespace tfla
