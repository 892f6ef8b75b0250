// A call as JAX lays it out, for the handlers (jax.cc) and the check at the time of tracing (jax_check.cc).
//
// Options travel in two arrays, `flags` and `numbers`, in the order of the two lists below. python/tfla/jax/_ffi.py
// writes them in the order in which it finds their names in the library. Optional tensors are left out of the list of
// arguments; a flag says which are there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tfla/tfla.h"

#define TFLA_EXPORT extern "C" __attribute__((visibility("default")))

namespace tfla::jax {

// An enumeration, and its names in their order.
#define TFLA_NAMED(Enumeration, names, count, ...)       \
  enum Enumeration : std::size_t { __VA_ARGS__, count }; \
  inline constexpr const char* names = #__VA_ARGS__
// has_state: C, n, m after f. has_index: cu_seqlens, or slots, comes last. has_C: of forward, the last state is wanted;
// of backward, dC of the last state is given. has_n: of backward, dn of the last state is given. has_saved: what
// forward leaves for backward is the last result of the one and the last argument of the other.
TFLA_NAMED(Flag, flag_names, flag_count, gate, normalizer, head_first, exact_normalizer_grad, chunk_size, keep,
           has_state, has_index, has_C, has_n, has_saved, has_qk_scale, has_soft_cap);
TFLA_NAMED(Number, number_names, number_count, eps, qk_scale, soft_cap);
#undef TFLA_NAMED

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
};

// A dense tensor of any rank.
struct Array {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::span<const std::int64_t> shape;
};

// The arguments or results of a call in their order, as views of one call of the operator.
class Arrays {
 public:
  Arrays(std::vector<Array> arrays, bool head_first) : arrays_(std::move(arrays)), head_first_(head_first) {}

  // Which part of the tensors is meant: their first `axes` axes come from vmap and make `count` calls.
  struct Part {
    std::size_t axes = 0;
    std::int64_t index = 0;
    std::int64_t count = 1;
    bool merged = true;  // all of them as one call
  };
  void start(const Part& part) {
    part_ = part;
    next_ = 0;
  }

  [[nodiscard]] TensorView tokens(const char* name) { return ordered(mutable_state(name)); }
  [[nodiscard]] MutableTensorView mutable_tokens(const char* name) { return ordered(mutable_state(name)); }
  [[nodiscard]] TensorView state(const char* name) { return mutable_state(name); }
  // An array of one axis, of any dtype, as the memory it has.
  [[nodiscard]] std::span<std::byte> bytes(const char* name) {
    const MutableTensorView view = mutable_state(name);
    return {static_cast<std::byte*>(view.data), static_cast<std::size_t>(view.shape[0]) * item_size(view.dtype)};
  }
  [[nodiscard]] MutableTensorView mutable_state(const char* name) {
    const Array& array = arrays_.at(next_++);
    if (array.shape.size() < part_.axes + 1 || array.shape.size() > part_.axes + MutableTensorView::max_rank) {
      throw InvalidArgument(std::string("tfla: ") + name + " has " + std::to_string(array.shape.size() - part_.axes) +
                            " axes; it must have 1 to 4");
    }
    const std::span<const std::int64_t> shape = array.shape.subspan(part_.axes);
    MutableTensorView view;
    view.dtype = array.dtype;
    view.rank = static_cast<int>(shape.size());
    std::int64_t size = 1;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      view.shape.at(axis) = shape[axis];
      view.strides.at(axis) = size;
      size *= shape[axis];
    }
    if (part_.merged) view.shape[0] *= part_.count;
    view.data = static_cast<std::byte*>(array.data) + part_.index * size * item_size(array.dtype);
    return view;
  }

 private:
  template <class View>
  [[nodiscard]] View ordered(const View& view) const {
    return head_first_ && view.rank >= 3 ? view.transposed(1, 2) : view;
  }

  std::vector<Array> arrays_;
  bool head_first_;
  Part part_;
  std::size_t next_ = 0;
};

struct Call {
  Settings settings;
  Arrays in, out;
};

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

}  // namespace tfla::jax
