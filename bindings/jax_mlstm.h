// The mLSTM as JAX lays it out.
#pragma once

#include "jax_arrays.h"

namespace tfla::jax {
namespace mlstm {

// has_state: C, n, m after f. has_index: cu_seqlens, or slots, comes last. has_C: of forward, the last state is wanted;
// of backward, dC of the last state is given. has_n: of backward, dn of the last state is given. has_saved: what
// forward leaves for backward is the last result of the one and the last argument of the other.
TFLA_NAMED(Flag, flag_names, flag_count, gate, normalizer, head_first, exact_normalizer_grad, chunk_size, keep,
           has_state, has_index, has_C, has_n, has_saved, has_qk_scale, has_soft_cap);
TFLA_NAMED(Number, number_names, number_count, eps, qk_scale, soft_cap);

struct Settings {
  std::span<const std::int64_t, flag_count> flags;
  MlstmOptions options;

  Settings(std::span<const std::int64_t> given, std::span<const double> numbers) : flags(given.first<flag_count>()) {
    options = {.gate = static_cast<InputGate>(flags[gate]),
               .normalizer = static_cast<Normalizer>(flags[normalizer]),
               .eps = numbers[eps],
               .exact_normalizer_grad = (*this)[exact_normalizer_grad],
               .chunk_size = flags[chunk_size],
               .keep = (*this)[has_saved] ? static_cast<Keep>(flags[keep]) : Keep::nothing};
    if ((*this)[has_qk_scale]) options.qk_scale = numbers[qk_scale];
    if ((*this)[has_soft_cap]) options.soft_cap = numbers[soft_cap];
  }
  [[nodiscard]] bool operator[](Flag flag) const { return flags[flag] != 0; }

  // Whether calls under vmap are made one after another: cu_seqlens and slots belong to one call.
  [[nodiscard]] bool separate() const { return (*this)[has_index]; }
  // Where C, n, m are among the arguments of a step.
  [[nodiscard]] static std::size_t first_state() { return 5; }
  static constexpr std::size_t state_parts = 3;
  // The results of forward besides h, which a check leaves out.
  static constexpr std::array<Flag, 2> further_results{has_C, has_saved};
};

using Call = CallOf<Settings>;

inline MlstmState state_of(Arrays& arrays) {
  const TensorView C = arrays.state("initial_state.C");
  const TensorView n = arrays.state("initial_state.n");
  return {C, n, arrays.state("initial_state.m")};
}

// The braces of each list are evaluated from left to right, which is the order of the arguments.
inline MlstmForward forward_args(Call& call) {
  MlstmForward args{.q = call.in.tokens("q"),
                    .k = call.in.tokens("k"),
                    .v = call.in.tokens("v"),
                    .i = call.in.tokens("i"),
                    .f = call.in.tokens("f"),
                    .h = call.out.mutable_tokens("h"),
                    .options = call.settings.options};
  if (call.settings[has_state]) args.initial_state = state_of(call.in);
  if (call.settings[has_index]) args.cu_seqlens = call.in.state("cu_seqlens");
  if (call.settings[has_C]) {
    args.last_state.C = call.out.mutable_state("last_state.C");
    args.last_state.n = call.out.mutable_state("last_state.n");
    args.last_state.m = call.out.mutable_state("last_state.m");
  }
  if (call.settings[has_saved]) args.saved = call.out.bytes("saved");
  return args;
}

inline MlstmBackward backward_args(Call& call) {
  MlstmBackward args{.q = call.in.tokens("q"),
                     .k = call.in.tokens("k"),
                     .v = call.in.tokens("v"),
                     .i = call.in.tokens("i"),
                     .f = call.in.tokens("f"),
                     .dh = call.in.tokens("dh"),
                     .dq = call.out.mutable_tokens("dq"),
                     .dk = call.out.mutable_tokens("dk"),
                     .dv = call.out.mutable_tokens("dv"),
                     .di = call.out.mutable_tokens("di"),
                     .df = call.out.mutable_tokens("df"),
                     .options = call.settings.options};
  if (call.settings[has_C]) args.dlast_state.C = call.in.state("dlast_state.C");
  if (call.settings[has_n]) args.dlast_state.n = call.in.state("dlast_state.n");
  if (call.settings[has_state]) {
    args.initial_state = state_of(call.in);
    args.dinitial_state.C = call.out.mutable_state("dinitial_state.C");
    args.dinitial_state.n = call.out.mutable_state("dinitial_state.n");
  }
  if (call.settings[has_index]) args.cu_seqlens = call.in.state("cu_seqlens");
  if (call.settings[has_saved]) args.saved = call.in.bytes("saved");
  return args;
}

// The results C, n, m are the arguments C, n, m: XLA is told to give both the same memory.
inline MlstmStep step_args(Call& call) {
  MlstmStep args{.q = call.in.tokens("q"),
                 .k = call.in.tokens("k"),
                 .v = call.in.tokens("v"),
                 .i = call.in.tokens("i"),
                 .f = call.in.tokens("f"),
                 .h = call.out.mutable_tokens("h"),
                 .state = {},
                 .options = call.settings.options};
  const MlstmState given = state_of(call.in);
  args.state.C = call.out.mutable_state("state.C");
  args.state.n = call.out.mutable_state("state.n");
  args.state.m = call.out.mutable_state("state.m");
  if (given.C.data != args.state.C.data || given.n.data != args.state.n.data || given.m.data != args.state.m.data) {
    throw std::logic_error("tfla: XLA gave the state of mlstm_step and its result different memory");
  }
  if (call.settings[has_index]) args.slots = call.in.state("slots");
  return args;
}

}  // namespace mlstm

// For the templates of jax.cc and jax_check.cc.
struct Mlstm {
  using Settings = mlstm::Settings;
  using Call = mlstm::Call;
  static constexpr auto head_first = mlstm::head_first, has_index = mlstm::has_index, flag_count = mlstm::flag_count;
  static constexpr auto number_count = mlstm::number_count;
  static constexpr const char* flag_names = mlstm::flag_names;
  static constexpr const char* number_names = mlstm::number_names;
  static constexpr auto forward_args = mlstm::forward_args;
  static constexpr auto backward_args = mlstm::backward_args;
  static constexpr auto step_args = mlstm::step_args;

  [[nodiscard]] static Plan make_plan(const auto& args, const Execution& execution) { return plan(args, execution); }
  static void run(const MlstmForward& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
    forward(args, plan, scratch, stream);
  }
  static void run(const MlstmBackward& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
    backward(args, plan, scratch, stream);
  }
  static void run(const MlstmStep& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
    step(args, plan, scratch, stream);
  }
};

}  // namespace tfla::jax
