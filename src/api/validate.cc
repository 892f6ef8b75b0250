#include "api/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "api/validate_parts.h"
#include "core/alignment.h"
#include "core/checks.h"
#include "core/gate_family.h"
#include "core/overlap.h"
#include "plan/backend.h"
#include "plan/kernel_table.h"
#include "tfla/error.h"

namespace tfla {

namespace {

// Far beyond what memory holds, and products of such numbers still fit 64 bits.
constexpr std::int64_t largest_head_dim = std::numeric_limits<std::int32_t>::max();

// q, k, v, i, f: what all three operations read. The shape is that of a dense batch.
template <class Args>
MlstmShape check_inputs(const Args& args) {
  check_rank("q", args.q, 4, "(B,T,Hqk,dqk)");
  check_rank("v", args.v, 4, "(B,T,H,dhv)");
  check_dtype("q", args.q, floats);
  const MlstmShape shape = shape_of(args);
  validate_shape(shape);
  check_same_dtype("k", args.k, "q", shape.dtype);
  check_same_dtype("v", args.v, "q", shape.dtype);
  check_keys("q", args.q, shape);
  check_keys("k", args.k, shape);
  check_values("v", args.v, shape);
  check_tensor("i", args.i, {shape.batch, shape.tokens, shape.heads}, "(B,T,H)", LastAxis::any);
  check_tensor("f", args.f, {shape.batch, shape.tokens, shape.heads}, "(B,T,H)", LastAxis::any);
  check_dtype("i", args.i, floats);
  check_dtype("f", args.f, floats);
  return shape;
}

void check_state_n(std::string_view name, const TensorView& n, std::int64_t states, const MlstmShape& shape) {
  check_state_part(name, n, shape, {states, shape.heads, shape.dqk}, "(N,H,dqk)", LastAxis::contiguous);
}
void check_state_m(std::string_view name, const TensorView& m, std::int64_t states, const MlstmShape& shape) {
  check_state_part(name, m, shape, {states, shape.heads}, "(N,H)", LastAxis::any);
}

// What the parts of a state are called in messages.
struct StateNames {
  const char *C, *n, *m;
};

template <class State>
void check_whole_state(const StateNames& names, const State& state, std::int64_t states, const MlstmShape& shape) {
  check_state_C(names.C, state.C, states, shape);
  check_state_n(names.n, state.n, states, shape);
  check_state_m(names.m, state.m, states, shape);
}

// All three parts or none.
template <class State>
void check_optional_state(const StateNames& names, const State& state, const MlstmShape& shape) {
  if (state.C.given() || state.n.given() || state.m.given()) check_whole_state(names, state, shape.sequences, shape);
}

template <class Grad>
void check_state_grad(const StateNames& names, const Grad& grad, const MlstmShape& shape) {
  if (grad.C.given()) check_state_C(names.C, grad.C, shape.sequences, shape);
  if (grad.n.given()) check_state_n(names.n, grad.n, shape.sequences, shape);
}

template <class Args>
void add_inputs(OverlapCheck& check, const Args& args) {
  check.input("q", args.q);
  check.input("k", args.k);
  check.input("v", args.v);
  check.input("i", args.i);
  check.input("f", args.f);
}

}  // namespace

void validate_shape(const MlstmShape& shape) {
  const auto is_float = [](DType dtype) { return std::find(floats.begin(), floats.end(), dtype) != floats.end(); };
  if (!is_float(shape.dtype)) {
    refuse(fmt::format("tfla: q has dtype {}; it must be a float type", tfla::name(shape.dtype)));
  }
  if (!is_float(shape.gate_dtype)) {
    refuse(fmt::format("tfla: i has dtype {}; it must be a float type", tfla::name(shape.gate_dtype)));
  }
  const auto at_least = [](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least) refuse(fmt::format("tfla: {} is {}; it must be at least {}", name, value, least));
  };
  at_least("the batch size B", shape.batch, 0);
  at_least("the number of tokens T", shape.tokens, 0);
  at_least("the number of sequences N", shape.sequences, 0);
  at_least("the longest sequence", shape.longest, 0);
  at_least("the number of query/key heads Hqk (axis 2 of q)", shape.qk_heads, 1);
  at_least("the number of value heads H (axis 2 of v)", shape.heads, 1);
  at_least("the head dimension dqk (axis 3 of q)", shape.dqk, 1);
  at_least("the head dimension dhv (axis 3 of v)", shape.dhv, 1);
  if (shape.heads % shape.qk_heads != 0) {
    refuse(fmt::format("tfla: v has {} heads and q has {}; the heads of v must be a multiple of those of q",
                       shape.heads, shape.qk_heads));
  }
  if (!shape.packed && shape.sequences != shape.batch) {
    refuse(fmt::format("tfla: there are {} sequences in a batch of {}; they must be equal unless they are packed",
                       shape.sequences, shape.batch));
  }
  if (shape.dqk > largest_head_dim || shape.dhv > largest_head_dim) {
    refuse(fmt::format("tfla: q has head dimension {} and v has {}; the largest is {}", shape.dqk, shape.dhv,
                       largest_head_dim));
  }
  // Far beyond what memory holds, and plans multiply such numbers in 64 bits.
  constexpr std::int64_t most_states = std::int64_t{1} << 48;
  if (shape.sequences > most_states / shape.heads) {
    refuse(fmt::format("tfla: there are {} sequences of {} heads; their states do not fit in memory", shape.sequences,
                       shape.heads));
  }
  std::int64_t tokens = 0;
  if (__builtin_mul_overflow(shape.batch, shape.tokens, &tokens) ||
      __builtin_mul_overflow(tokens, shape.heads, &tokens)) {
    refuse(fmt::format("tfla: q and v have {} x {} tokens of {} heads, which overflows 64 bits", shape.batch,
                       shape.tokens, shape.heads));
  }
}

void validate_options(const MlstmOptions& options, Operation operation) {
  const auto in_range = [](auto value, auto highest) { return static_cast<int>(value) <= static_cast<int>(highest); };
  if (!in_range(operation, Operation::step)) refuse("tfla: operation is not one of forward, backward and step");
  if (!is_known(options.gate)) {
    std::vector<std::string_view> names;
    for (const GateRow& row : gate_table) names.emplace_back(row.name);
    const std::string_view last = names.back();
    names.pop_back();
    refuse(fmt::format("tfla: options.gate is not one of {} and {}", fmt::join(names, ", "), last));
  }
  if (!in_range(options.normalizer, Normalizer::max)) {
    refuse("tfla: options.normalizer is not one of automatic, none and max");
  }
  if (!in_range(options.formulation, Formulation::recurrent)) {
    refuse("tfla: options.formulation is not one of chunkwise, parallel and recurrent");
  }
  if (!in_range(options.keep, Keep::states)) {
    refuse("tfla: options.keep is not one of nothing, denominators and states");
  }
  if (!std::isfinite(options.eps) || options.eps < 0) {
    refuse(fmt::format("tfla: options.eps is {}; it must be finite and not negative", options.eps));
  }
  if (options.qk_scale && !std::isfinite(*options.qk_scale)) {
    refuse(fmt::format("tfla: options.qk_scale is {}; it must be finite", *options.qk_scale));
  }
  if (options.soft_cap && (!std::isfinite(*options.soft_cap) || *options.soft_cap <= 0)) {
    refuse(fmt::format("tfla: options.soft_cap is {}; it must be finite and positive, or left out", *options.soft_cap));
  }
  if (options.chunk_size < 0) {
    refuse(fmt::format("tfla: options.chunk_size is {}; it must be positive, or 0 to let the plan choose",
                       options.chunk_size));
  }
  if (operation == Operation::backward && options.formulation == Formulation::recurrent) {
    refuse("tfla: options.formulation is recurrent, which has no backward; use chunkwise or parallel");
  }
}

namespace {

void check_gpu(const DeviceFacts& gpu) {
  constexpr int oldest = 80;
  if (gpu.capability < oldest) {
    refuse(fmt::format("tfla: execution.gpu has capability {}; it must be 80 or newer", gpu.capability));
  }
  if (gpu.multiprocessors < 1) {
    refuse(fmt::format("tfla: execution.gpu has {} multiprocessors; it must have one or more", gpu.multiprocessors));
  }
  constexpr int least_shared = most_shared_bytes(Needs::any_gpu);
  if (gpu.shared_bytes < least_shared) {
    refuse(fmt::format("tfla: execution.gpu has {} bytes of shared memory for a CTA; it must have {} or more",
                       gpu.shared_bytes, least_shared));
  }
}

template <class Args, class... Views>
bool all_mapped(const Args& args, const Views&... views) {
  const std::int64_t packed_tokens = args.cu_seqlens.given() ? args.q.shape[1] : 0;
  return (has_tensor_map(views, packed_tokens) && ...);
}

}  // namespace

bool is_aligned(const MlstmForward& args) {
  if (args.options.formulation == Formulation::recurrent) return rows_on_16_bytes(args.last_state.C);
  return all_mapped(args, args.q, args.k, args.v, args.h);
}

bool is_aligned(const MlstmBackward& args) {
  return all_mapped(args, args.q, args.k, args.v, args.dh, args.dq, args.dk, args.dv);
}

bool is_aligned(const MlstmStep& args) { return rows_on_16_bytes(args.state.C); }

void validate_execution(const Execution& execution) {
  if (execution.threads < 0) {
    refuse(fmt::format("tfla: execution.threads is {}; it must be positive, or 0 for the default", execution.threads));
  }
  if (execution.device == Device::cuda) {
    if (execution.gpu) check_gpu(*execution.gpu);
    if (!execution.gpu) backend(Device::cuda).check_available();
  } else if (execution.device != Device::cpu) {
    refuse("tfla: execution.device is not one of cpu and cuda");
  }
}

void validate_untested(const Execution& execution, std::string_view operator_name) {
  if (execution.device == Device::cuda && !execution.untested)
    throw Unavailable(fmt::format("tfla: {} has no CUDA kernels yet; use the device cpu", operator_name));
  validate_execution(execution);
}

MlstmShape validate(const MlstmForward& args, Device device) {
  validate_options(args.options, Operation::forward);
  MlstmShape shape = check_inputs(args);
  check_values("h", args.h, shape);
  check_cu_seqlens(args.cu_seqlens, device, shape);
  check_optional_state({"initial_state.C", "initial_state.n", "initial_state.m"}, args.initial_state, shape);
  check_optional_state({"last_state.C", "last_state.n", "last_state.m"}, args.last_state, shape);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("initial_state.C", args.initial_state.C);
  check.input("initial_state.n", args.initial_state.n);
  check.input("initial_state.m", args.initial_state.m);
  check.output("h", args.h);
  check.output_in_place_of("last_state.C", args.last_state.C, "initial_state.C");
  check.output_in_place_of("last_state.n", args.last_state.n, "initial_state.n");
  check.output_in_place_of("last_state.m", args.last_state.m, "initial_state.m");
  // On the CPU nothing depends on it.
  const auto same = [](const TensorView& a, const TensorView& b) {
    return a.given() && b.given() && !is_empty(a) && a.data == b.data;
  };
  shape.states = device == Device::cuda && shape.packed && (args.initial_state.C.given() || args.last_state.C.given());
  shape.in_place = device == Device::cuda &&
                   (same(args.last_state.C, args.initial_state.C) || same(args.last_state.n, args.initial_state.n) ||
                    same(args.last_state.m, args.initial_state.m));
  shape.aligned = device != Device::cuda || is_aligned(args);
  return shape;
}

MlstmShape validate(const MlstmBackward& args, Device device) {
  validate_options(args.options, Operation::backward);
  MlstmShape shape = check_inputs(args);
  check_values("dh", args.dh, shape);
  check_keys("dq", args.dq, shape);
  check_keys("dk", args.dk, shape);
  check_values("dv", args.dv, shape);
  check_tensor("di", args.di, {shape.batch, shape.tokens, shape.heads}, "(B,T,H)", LastAxis::any);
  check_tensor("df", args.df, {shape.batch, shape.tokens, shape.heads}, "(B,T,H)", LastAxis::any);
  check_same_dtype("di", args.di, "i", args.i.dtype);
  check_same_dtype("df", args.df, "f", args.f.dtype);
  check_cu_seqlens(args.cu_seqlens, device, shape);
  check_optional_state({"initial_state.C", "initial_state.n", "initial_state.m"}, args.initial_state, shape);
  check_state_grad({"dlast_state.C", "dlast_state.n", nullptr}, args.dlast_state, shape);
  check_state_grad({"dinitial_state.C", "dinitial_state.n", nullptr}, args.dinitial_state, shape);
  shape.states = device == Device::cuda && shape.packed &&
                 (args.initial_state.C.given() || args.dlast_state.C.given() || args.dlast_state.n.given() ||
                  args.dinitial_state.C.given() || args.dinitial_state.n.given());

  OverlapCheck check;
  add_inputs(check, args);
  check.input("dh", args.dh);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("initial_state.C", args.initial_state.C);
  check.input("initial_state.n", args.initial_state.n);
  check.input("initial_state.m", args.initial_state.m);
  check.input("dlast_state.C", args.dlast_state.C);
  check.input("dlast_state.n", args.dlast_state.n);
  check.output("dq", args.dq);
  check.output("dk", args.dk);
  check.output("dv", args.dv);
  check.output("di", args.di);
  check.output("df", args.df);
  check.output("dinitial_state.C", args.dinitial_state.C);
  check.output("dinitial_state.n", args.dinitial_state.n);
  shape.aligned = device != Device::cuda || is_aligned(args);
  return shape;
}

MlstmShape validate(const MlstmStep& args, Device device) {
  validate_options(args.options, Operation::step);
  MlstmShape shape = check_inputs(args);
  check_values("h", args.h, shape);
  check_rank("state.C", args.state.C, 4, "(S,H,dqk,dhv)");
  const std::int64_t states = args.state.C.shape[0];
  check_whole_state({"state.C", "state.n", "state.m"}, args.state, states, shape);
  check_slots(args.slots, device, shape, "state.C", states);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("slots", args.slots);
  check.output("h", args.h);
  check.output("state.C", args.state.C);
  check.output("state.n", args.state.n);
  check.output("state.m", args.state.m);
  shape.aligned = device != Device::cuda || is_aligned(args);
  return shape;
}

}  // namespace tfla
