#include "api/validate_conv.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "api/validate_parts.h"
#include "core/checks.h"
#include "core/read_index.h"

namespace tfla {

namespace {

constexpr const char* token_axes = "(B,T,D)";

// A tensor like x.
void check_tokens(const char* name, const TensorView& view, const ConvShape& shape) {
  check_tensor(name, view, {shape.batch, shape.tokens, shape.channels}, token_axes, LastAxis::any);
  check_same_dtype(name, view, "x", shape.dtype);
}

// The tokens lie side by side and the channels do not.
bool lies_along_tokens(const TensorView& x) { return x.strides[2] != 1 && x.strides[1] == 1; }

// x, weight and bias: what all three operations read. The shape is that of a dense batch.
template <class Args>
ConvShape check_inputs(const Args& args) {
  check_rank("x", args.x, 3, token_axes);
  check_dtype("x", args.x, floats);
  check_rank("weight", args.weight, 2, "(D,W)");
  check_dtype("weight", args.weight, floats);
  const ConvShape shape{.batch = args.x.shape[0],
                        .tokens = args.x.shape[1],
                        .channels = args.x.shape[2],
                        .width = args.weight.shape[1],
                        .sequences = args.x.shape[0],
                        .dtype = args.x.dtype,
                        .along_tokens = lies_along_tokens(args.x)};
  validate_shape(shape);
  check_tokens("x", args.x, shape);
  check_tensor("weight", args.weight, {shape.channels, shape.width}, "(D,W)", LastAxis::any);
  if (!args.bias.given()) return shape;
  check_tensor("bias", args.bias, {shape.channels}, "(D)", LastAxis::any);
  check_dtype("bias", args.bias, floats);
  return shape;
}

void check_optional_state(const char* name, const TensorView& view, const ConvShape& shape) {
  if (!view.given()) return;
  check_tensor(name, view, {shape.sequences, shape.width - 1, shape.channels}, "(N,W-1,D)", LastAxis::any);
  check_dtype(name, view, floats);
}

MlstmShape dense_shape(const ConvShape& shape) {
  return {.batch = shape.batch, .tokens = shape.tokens, .sequences = shape.sequences};
}

void check_packing(const TensorView& cu_seqlens, Device device, ConvShape& shape) {
  MlstmShape packed = dense_shape(shape);
  check_cu_seqlens(cu_seqlens, device, packed);
  shape.packed = packed.packed;
  shape.sequences = packed.sequences;
}

// Whether rows of the tensors, which all have the shape of x, begin on 16 bytes and their channels lie side by side.
bool are_aligned(std::initializer_list<TensorView> tensors) {
  return std::ranges::all_of(tensors, [](const TensorView& view) {
    const auto whole = [&](int axis) {
      return view.shape[axis] <= 1 || view.strides[axis] * item_size(view.dtype) % 16 == 0;
    };
    return view.strides[2] == 1 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && whole(0) && whole(1);
  });
}

// The number of a sequence must not come back while a window still reaches what lies before the others. What lies on a
// GPU is not seen here.
void check_numbers(const TensorView& seq_idx, const ConvShape& shape) {
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    TensorView row = seq_idx;
    row.strides[0] = seq_idx.strides[1];
    row.data = static_cast<const std::byte*>(seq_idx.data) + b * seq_idx.strides[0] * item_size(seq_idx.dtype);
    std::int64_t begin = 0;  // the first token that has the number of the last one
    for (std::int64_t t = 1; t < shape.tokens; ++t) {
      const std::int64_t number = read_index(row, t);
      if (number == read_index(row, t - 1)) continue;
      for (std::int64_t back = begin - 1; number >= 0 && back >= std::max<std::int64_t>(t - shape.width + 1, 0);
           --back) {
        if (read_index(row, back) != number) continue;
        refuse(
            fmt::format("tfla: seq_idx is {} again at token {} of row {}, {} tokens after another number; the tokens "
                        "of a sequence must be neighbours",
                        number, t, b, t - begin));
      }
      begin = t;
    }
  }
}

template <class Args>
void check_seq_idx(const Args& args, Device device, const ConvShape& shape,
                   std::initializer_list<std::pair<const char*, bool>> apart) {
  if (!args.seq_idx.given()) return;
  check_tensor("seq_idx", args.seq_idx, {shape.batch, shape.tokens}, "(B,T)", LastAxis::any);
  check_dtype("seq_idx", args.seq_idx, integers);
  for (const auto& [name, given] : apart) {
    if (given)
      refuse(fmt::format("tfla: seq_idx is given with {}; sequences that it tells apart have no states", name));
  }
  if (device == Device::cpu) check_numbers(args.seq_idx, shape);
}

template <class Args>
void add_inputs(OverlapCheck& check, const Args& args) {
  check.input("x", args.x);
  check.input("weight", args.weight);
  check.input("bias", args.bias);
}

void check_cache_seqlens(const TensorView& cache, Device device, const ConvShape& shape) {
  if (!cache.given()) return;
  check_tensor("cache_seqlens", cache, {shape.batch}, "(B)", LastAxis::any);
  check_dtype("cache_seqlens", cache, integers);
  if (device != Device::cpu) return;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    const std::int64_t count = read_index(cache, b);
    if (count < 0) refuse(fmt::format("tfla: cache_seqlens[{}] is {}; it must not be negative", b, count));
  }
}

}  // namespace

void validate_shape(const ConvShape& shape) {
  if (std::find(floats.begin(), floats.end(), shape.dtype) == floats.end()) {
    refuse(fmt::format("tfla: x has dtype {}; it must be a float type", tfla::name(shape.dtype)));
  }
  const auto at_least = [](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least) refuse(fmt::format("tfla: {} is {}; it must be at least {}", name, value, least));
  };
  at_least("the batch size B (axis 0 of x)", shape.batch, 0);
  at_least("the number of tokens T (axis 1 of x)", shape.tokens, 0);
  at_least("the number of channels D (axis 2 of x)", shape.channels, 1);
  at_least("the number of sequences N", shape.sequences, 0);
  if (shape.width < 1 || shape.width > max_conv_width) {
    refuse(fmt::format("tfla: weight has the width {}; it must be 1 to {}", shape.width, max_conv_width));
  }
  if (!shape.packed && shape.sequences != shape.batch) {
    refuse(fmt::format("tfla: there are {} sequences in a batch of {}; they must be equal unless they are packed",
                       shape.sequences, shape.batch));
  }
  const double elements =
      static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) * static_cast<double>(shape.channels);
  if (elements > 0x1p56 || shape.channels > (std::int64_t{1} << 48)) {
    refuse(fmt::format("tfla: x has shape ({},{},{}), which does not fit in memory", shape.batch, shape.tokens,
                       shape.channels));
  }
}

void validate_options(const ConvOptions& options, Operation operation) {
  if (operation > Operation::step) refuse("tfla: operation is not one of forward, backward and step");
  if (options.activation > ConvActivation::silu) refuse("tfla: options.activation is not one of none and silu");
}

ConvShape validate(const ConvForward& args, Device device) {
  validate_options(args.options, Operation::forward);
  ConvShape shape = check_inputs(args);
  check_tokens("y", args.y, shape);
  check_packing(args.cu_seqlens, device, shape);
  check_optional_state("initial_state", args.initial_state, shape);
  check_optional_state("last_state", args.last_state, shape);
  check_seq_idx(args, device, shape,
                {{"cu_seqlens", args.cu_seqlens.given()},
                 {"initial_state", args.initial_state.given()},
                 {"last_state", args.last_state.given()}});

  OverlapCheck check;
  add_inputs(check, args);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("seq_idx", args.seq_idx);
  check.input("initial_state", args.initial_state);
  check.output("y", args.y);
  check.output_in_place_of("last_state", args.last_state, "initial_state");
  if (device == Device::cuda) shape.aligned = are_aligned({args.x, args.y});
  return shape;
}

ConvShape validate(const ConvBackward& args, Device device) {
  validate_options(args.options, Operation::backward);
  ConvShape shape = check_inputs(args);
  check_tokens("dy", args.dy, shape);
  check_tokens("dx", args.dx, shape);
  check_tensor("dweight", args.dweight, {shape.channels, shape.width}, "(D,W)", LastAxis::any);
  check_same_dtype("dweight", args.dweight, "weight", args.weight.dtype);
  if (args.dbias.given() != args.bias.given()) {
    refuse(fmt::format("tfla: dbias is {} and bias is {}; both must be given, or neither",
                       args.dbias.given() ? "given" : "missing", args.bias.given() ? "given" : "missing"));
  }
  if (args.dbias.given()) {
    check_tensor("dbias", args.dbias, {shape.channels}, "(D)", LastAxis::any);
    check_same_dtype("dbias", args.dbias, "bias", args.bias.dtype);
  }
  check_packing(args.cu_seqlens, device, shape);
  check_optional_state("initial_state", args.initial_state, shape);
  check_optional_state("dlast_state", args.dlast_state, shape);
  check_optional_state("dinitial_state", args.dinitial_state, shape);
  check_seq_idx(args, device, shape,
                {{"cu_seqlens", args.cu_seqlens.given()},
                 {"initial_state", args.initial_state.given()},
                 {"dlast_state", args.dlast_state.given()},
                 {"dinitial_state", args.dinitial_state.given()}});

  OverlapCheck check;
  add_inputs(check, args);
  check.input("dy", args.dy);
  check.input("cu_seqlens", args.cu_seqlens);
  check.input("seq_idx", args.seq_idx);
  check.input("initial_state", args.initial_state);
  check.input("dlast_state", args.dlast_state);
  check.output("dx", args.dx);
  check.output("dweight", args.dweight);
  check.output("dbias", args.dbias);
  check.output("dinitial_state", args.dinitial_state);
  if (device == Device::cuda) shape.aligned = are_aligned({args.x, args.dy, args.dx});
  return shape;
}

ConvShape validate(const ConvStep& args, Device device) {
  validate_options(args.options, Operation::step);
  const ConvShape shape = check_inputs(args);
  check_tokens("y", args.y, shape);
  check_rank("state", args.state, 3, "(S,L,D)");
  if (args.state.shape[1] < shape.width - 1) {
    refuse(fmt::format("tfla: state holds {} inputs of a sequence; a weight of width {} needs at least {}",
                       args.state.shape[1], shape.width, shape.width - 1));
  }
  check_tensor("state", args.state, {args.state.shape[0], args.state.shape[1], shape.channels}, "(S,L,D)",
               LastAxis::any);
  check_dtype("state", args.state, floats);
  check_slots(args.slots, device, dense_shape(shape), "state", args.state.shape[0]);
  check_cache_seqlens(args.cache_seqlens, device, shape);

  OverlapCheck check;
  add_inputs(check, args);
  check.input("slots", args.slots);
  check.input("cache_seqlens", args.cache_seqlens);
  check.output("y", args.y);
  check.output("state", args.state);
  return shape;
}

}  // namespace tfla
