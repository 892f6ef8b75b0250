// The delta rule as JAX lays it out.
#pragma once

#include "jax_arrays.h"

namespace tfla::jax {
namespace delta {

// has_g, has_A_log, has_dt_bias: each after beta, in this order; has_state: C after these. has_index: cu_seqlens, or
// slots, comes last. has_C: of forward, the last state is wanted; of backward, its gradient follows dh.
TFLA_NAMED(Flag, flag_names, flag_count, write, normalize_qk, head_first, chunk_size, has_g, has_A_log, has_dt_bias,
           has_state, has_index, has_C, has_qk_scale);
TFLA_NAMED(Number, number_names, number_count, qk_scale);

struct Settings {
  std::span<const std::int64_t, flag_count> flags;
  DeltaOptions options;

  Settings(std::span<const std::int64_t> given, std::span<const double> numbers) : flags(given.first<flag_count>()) {
    options = {.write = static_cast<WriteGate>(flags[write]),
               .normalize_qk = (*this)[normalize_qk],
               .chunk_size = flags[chunk_size]};
    if ((*this)[has_qk_scale]) options.qk_scale = numbers[qk_scale];
  }
  [[nodiscard]] bool operator[](Flag flag) const { return flags[flag] != 0; }

  // Whether calls under vmap are made one after another: cu_seqlens and slots belong to one call, and A_log and
  // dt_bias, which have no batch, may differ from call to call.
  [[nodiscard]] bool separate() const { return (*this)[has_index] || (*this)[has_A_log] || (*this)[has_dt_bias]; }
  // Where C is among the arguments of a step.
  [[nodiscard]] std::size_t first_state() const {
    return 4 + static_cast<std::size_t>(flags[has_g] + flags[has_A_log] + flags[has_dt_bias]);
  }
  static constexpr std::size_t state_parts = 1;
  // The results of forward besides h, which a check leaves out.
  static constexpr std::array<Flag, 1> further_results{has_C};
};
using Call = CallOf<Settings>;

// Arrays are taken in the order of the arguments.
template <class Args>
void take_tokens(Call& call, Args& args) {
  args.q = call.in.tokens("q");
  args.k = call.in.tokens("k");
  args.v = call.in.tokens("v");
  args.beta = call.in.tokens("beta");
  if (call.settings[has_g]) args.g = call.in.tokens("g");
  if (call.settings[has_A_log]) args.A_log = call.in.state("A_log");
  if (call.settings[has_dt_bias]) args.dt_bias = call.in.state("dt_bias");
  args.options = call.settings.options;
}

inline DeltaForward forward_args(Call& call) {
  DeltaForward args;
  take_tokens(call, args);
  args.h = call.out.mutable_tokens("h");
  if (call.settings[has_state]) args.initial_state = call.in.state("initial_state");
  if (call.settings[has_index]) args.cu_seqlens = call.in.state("cu_seqlens");
  if (call.settings[has_C]) args.last_state = call.out.mutable_state("last_state");
  return args;
}

inline DeltaBackward backward_args(Call& call) {
  DeltaBackward args;
  take_tokens(call, args);
  args.dh = call.in.tokens("dh");
  args.dq = call.out.mutable_tokens("dq");
  args.dk = call.out.mutable_tokens("dk");
  args.dv = call.out.mutable_tokens("dv");
  args.dbeta = call.out.mutable_tokens("dbeta");
  if (call.settings[has_g]) args.dg = call.out.mutable_tokens("dg");
  if (call.settings[has_A_log]) args.dA_log = call.out.mutable_state("dA_log");
  if (call.settings[has_dt_bias]) args.ddt_bias = call.out.mutable_state("ddt_bias");
  if (call.settings[has_C]) args.dlast_state = call.in.state("dlast_state");
  if (call.settings[has_state]) {
    args.initial_state = call.in.state("initial_state");
    args.dinitial_state = call.out.mutable_state("dinitial_state");
  }
  if (call.settings[has_index]) args.cu_seqlens = call.in.state("cu_seqlens");
  return args;
}

// The result C is the argument C: XLA is told to give both the same memory.
inline DeltaStep step_args(Call& call) {
  DeltaStep args;
  take_tokens(call, args);
  args.h = call.out.mutable_tokens("h");
  const TensorView given = call.in.state("state");
  args.state = call.out.mutable_state("state");
  if (given.data != args.state.data) {
    throw std::logic_error("tfla: XLA gave the state of delta_rule_step and its result different memory");
  }
  if (call.settings[has_index]) args.slots = call.in.state("slots");
  return args;
}

}  // namespace delta

// For the templates of jax.cc and jax_check.cc.
struct Delta {
  using Settings = delta::Settings;
  using Call = delta::Call;
  static constexpr auto head_first = delta::head_first, has_index = delta::has_index, flag_count = delta::flag_count;
  static constexpr auto number_count = delta::number_count;
  static constexpr const char* flag_names = delta::flag_names;
  static constexpr const char* number_names = delta::number_names;
  static constexpr auto forward_args = delta::forward_args;
  static constexpr auto backward_args = delta::backward_args;
  static constexpr auto step_args = delta::step_args;

  [[nodiscard]] static DeltaPlan make_plan(const auto& args, const Execution& execution) {
    return delta_plan(args, execution);
  }
  static void run(const DeltaForward& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
    delta_forward(args, plan, scratch, stream);
  }
  static void run(const DeltaBackward& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
    delta_backward(args, plan, scratch, stream);
  }
  static void run(const DeltaStep& args, const DeltaPlan& plan, std::span<std::byte> scratch, void* stream) {
    delta_step(args, plan, scratch, stream);
  }
};

}  // namespace tfla::jax
