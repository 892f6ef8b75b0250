// The causal convolution as PyTorch sees it. x is always (B,T,D), in any strides: other layouts are views of it.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "tfla/tfla.h"
#include "torch_call.h"
#include "torch_tensor.h"

namespace {

using tfla::TensorView;
using tfla::binding::Arguments;
using tfla::binding::enumerator;
using tfla::binding::give;
using tfla::binding::gradient_of;
using tfla::binding::Owned;
using tfla::binding::Place;
using tfla::binding::run;
using tfla::binding::TensorRef;
using tfla::binding::text;
using tfla::binding::Views;
using tfla::binding::with_token_axis;

// What all operators of the convolution take. state: the initial one of sequences; index: cu_seqlens of sequences,
// slots of steps; place: seq_idx of sequences, cache_seqlens of steps.
struct Conv {
  Owned x, weight, bias, state, index, place;
  tfla::ConvOptions options;
};

Conv take(Arguments& given, bool step) {
  Conv c;
  c.x = given.tensor("x");
  c.weight = given.tensor("weight");
  c.bias = given.maybe_tensor();
  c.state = step ? given.tensor("state") : given.maybe_tensor();
  c.index = given.maybe_tensor();
  c.place = given.maybe_tensor();
  c.options.activation = enumerator<tfla::ConvActivation>(given.take<std::int64_t>());
  given.refuse_missing();
  return c;
}

// Shaped as x, with tokens side by side in memory where x has them so, else channels; `fake` of
// python/tfla/_torch/conv.py says the same.
Owned empty_laid_as(const Place& place, TensorRef x) {
  const std::int64_t rank = tfla::binding::rank_of("x", x), *strides = x.strides(), *sizes = x.sizes();
  if (rank != 3 || strides[2] == 1 || strides[1] != 1) return place.empty_like("x", x);
  const auto at_least_one = [](std::int64_t size) { return size > 0 ? size : 1; };
  const std::int64_t token_stride = at_least_one(sizes[1]);
  const std::int64_t along[3] = {token_stride * at_least_one(sizes[2]), 1, token_stride};
  return place.empty_strided(x.dtype(), sizes, along, rank);
}

template <bool LastState>
void causal_conv1d(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Conv c = take(given, false);
  const Place place(c.x);
  const Views views(place, false);
  Owned y = empty_laid_as(place, c.x), last;
  tfla::ConvForward args{
      .x = views.input("x", c.x),
      .weight = views.plain("weight", c.weight),
      .bias = views.plain("bias", c.bias),
      .y = views.output("y", y),
      .initial_state = views.plain("initial_state", c.state),
      .cu_seqlens = views.plain("cu_seqlens", c.index),
      .seq_idx = views.plain("seq_idx", c.place),
      .options = c.options,
  };
  if constexpr (LastState) {
    if (args.x.rank == 3 && args.weight.rank == 2 && args.weight.shape[1] > 0) {  // else left to validation
      const std::int64_t states = args.cu_seqlens.given() ? args.cu_seqlens.shape[0] - 1 : args.x.shape[0];
      if (states < 0)
        throw tfla::InvalidArgument("tfla: cu_seqlens is empty; it must hold at least the 0 it begins with");
      last = place.empty(TensorRef(c.x).dtype(), {states, args.weight.shape[1] - 1, args.x.shape[2]});
      args.last_state = views.in_place("last_state", last);
    }
  }
  run<tfla::ConvForward>(tfla::conv_plan(args, place.execution()), args, place, tfla::conv_forward);
  give(stack, std::move(y));
  if constexpr (LastState) give(stack + 1, std::move(last));
}

// dy and dstate, then what forward takes.
void causal_conv1d_backward(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Owned dy = given.tensor("dy"), dstate = given.maybe_tensor();
  const Conv c = take(given, false);
  const Place place(c.x);
  const Views views(place, false);
  Owned dx = empty_laid_as(place, c.x);
  Owned dweight = place.empty_like("weight", c.weight);
  Owned dbias = gradient_of(place, "bias", c.bias);
  Owned dinitial = gradient_of(place, "initial_state", c.state);
  tfla::ConvBackward args{
      .x = views.input("x", c.x),
      .weight = views.plain("weight", c.weight),
      .bias = views.plain("bias", c.bias),
      .dy = views.input("dy", dy),
      .dx = views.output("dx", dx),
      .dweight = views.output("dweight", dweight),
      .initial_state = views.plain("initial_state", c.state),
      .dlast_state = views.plain("dlast_state", dstate),
      .cu_seqlens = views.plain("cu_seqlens", c.index),
      .seq_idx = views.plain("seq_idx", c.place),
      .options = c.options,
  };
  if (c.bias) args.dbias = views.in_place("dbias", dbias);
  if (c.state) args.dinitial_state = views.in_place("dinitial_state", dinitial);
  run<tfla::ConvBackward>(tfla::conv_plan(args, place.execution()), args, place, tfla::conv_backward);
  give(stack, std::move(dx), std::move(dweight), std::move(dbias), std::move(dinitial));
}

void causal_conv1d_step(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Conv c = take(given, true);
  const Place place(c.x);
  const Views views(place, false);
  const bool one_token = TensorRef(c.x).rank() == 2;
  const auto tokens = [&](auto view) { return one_token ? with_token_axis(view) : view; };
  Owned y = empty_laid_as(place, c.x);
  const tfla::ConvStep args{
      .x = tokens(views.input("x", c.x)),
      .weight = views.plain("weight", c.weight),
      .bias = views.plain("bias", c.bias),
      .y = tokens(views.output("y", y)),
      .state = views.in_place("state", c.state),
      .slots = views.plain("slots", c.index),
      .cache_seqlens = views.plain("cache_seqlens", c.place),
      .options = c.options,
  };
  run<tfla::ConvStep>(tfla::conv_plan(args, place.execution()), args, place, tfla::conv_step);
  give(stack, std::move(y));
}

std::string of_sequences() {
  return "Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
         "Tensor? seq_idx=None, int activation=" +
         text(static_cast<int>(tfla::ConvOptions{}.activation)) + ")";
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tfla, library) {
  const auto define = [&](const std::string& schema) { library.def(schema.c_str()); };
  define("causal_conv1d(" + of_sequences() + " -> Tensor");
  define("causal_conv1d_with_state(" + of_sequences() + " -> (Tensor, Tensor)");
  define("causal_conv1d_backward(Tensor dy, Tensor? dstate, " + of_sequences() +
         " -> (Tensor, Tensor, Tensor, Tensor)");
  define(
      "causal_conv1d_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor? slots=None, "
      "Tensor? cache_seqlens=None, int activation=0) -> Tensor");
}

#define TFLA_KERNELS(library)                                       \
  (library).impl("causal_conv1d", causal_conv1d<false>);            \
  (library).impl("causal_conv1d_with_state", causal_conv1d<true>);  \
  (library).impl("causal_conv1d_backward", causal_conv1d_backward); \
  (library).impl("causal_conv1d_step", causal_conv1d_step)

STABLE_TORCH_LIBRARY_IMPL(tfla, CPU, library) { TFLA_KERNELS(library); }
STABLE_TORCH_LIBRARY_IMPL(tfla, CUDA, library) { TFLA_KERNELS(library); }
