// The delta rule as PyTorch sees it; torch.cc says how options and layouts travel.
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
using tfla::binding::count_states;
using tfla::binding::enumerator;
using tfla::binding::give;
using tfla::binding::gradient_of;
using tfla::binding::Owned;
using tfla::binding::Place;
using tfla::binding::run;
using tfla::binding::state_dtype;
using tfla::binding::TensorRef;
using tfla::binding::text;
using tfla::binding::Views;
using tfla::binding::with_contiguous_last_axis;
using tfla::binding::with_token_axis;

// What all operators of the delta rule take. C: the state; index: cu_seqlens of sequences, slots of steps.
struct Delta {
  Owned q, k, v, beta, g, A_log, dt_bias, C, index;
  bool head_first = false;
  tfla::DeltaOptions options;
};

void take_tokens(Arguments& given, Delta& d) {
  d.q = given.tensor("q");
  d.k = given.tensor("k");
  d.v = given.tensor("v");
  d.beta = given.tensor("beta");
  for (Owned* tensor : {&d.g, &d.A_log, &d.dt_bias}) *tensor = given.maybe_tensor();
}

// The options that sequences and steps have in common.
void take_family(Arguments& given, Delta& d) {
  d.options.write = enumerator<tfla::WriteGate>(given.take<std::int64_t>());
  d.options.normalize_qk = given.take<bool>();
  d.head_first = given.take<bool>();
  d.options.qk_scale = given.take<std::optional<double>>();
}

Delta take_sequence(Arguments& given) {
  Delta d;
  take_tokens(given, d);
  d.C = given.maybe_tensor();
  d.index = given.maybe_tensor();
  take_family(given, d);
  d.options.chunk_size = given.take<std::int64_t>();
  given.refuse_missing();
  return d;
}

Delta take_step(Arguments& given) {
  Delta d;
  take_tokens(given, d);
  d.C = given.tensor("state");
  d.index = given.maybe_tensor();
  take_family(given, d);
  given.refuse_missing();
  return d;
}

TensorView maybe_input(const Views& views, const char* name, const Owned& tensor) {
  return tensor ? views.input(name, tensor) : TensorView{};
}

template <bool LastState>
void delta_rule(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Delta d = take_sequence(given);
  const Place place(d.q);
  const Views views(place, d.head_first);
  Owned h = place.empty_like("v", d.v), last;
  tfla::DeltaForward args{
      .q = views.input("q", d.q),
      .k = views.input("k", d.k),
      .v = views.input("v", d.v),
      .beta = views.input("beta", d.beta),
      .g = maybe_input(views, "g", d.g),
      .A_log = views.plain("A_log", d.A_log),
      .dt_bias = views.plain("dt_bias", d.dt_bias),
      .h = views.output("h", h),
      .initial_state = views.plain("initial_state", d.C),
      .cu_seqlens = views.plain("cu_seqlens", d.index),
      .options = d.options,
  };
  if constexpr (LastState) {
    const std::int64_t states = count_states(args.cu_seqlens, args.v);
    last = place.empty(state_dtype(args.q.dtype), {states, args.v.shape[2], args.q.shape[3], args.v.shape[3]});
    args.last_state = views.in_place("last_state", last);
  }
  run<tfla::DeltaForward>(tfla::delta_plan(args, place.execution()), args, place, tfla::delta_forward);
  give(stack, std::move(h));
  if constexpr (LastState) give(stack + 1, std::move(last));
}

// dh and dC, then what forward takes.
void delta_rule_backward(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  Owned dh = given.tensor("dh"), dC = given.maybe_tensor();
  const Delta d = take_sequence(given);
  for (Owned* gradient : {&dh, &dC}) *gradient = with_contiguous_last_axis(std::move(*gradient));
  const Place place(d.q);
  const Views views(place, d.head_first);
  Owned dq = place.empty_like("q", d.q);
  Owned dk = place.empty_like("k", d.k);
  Owned dv = place.empty_like("v", d.v);
  Owned dbeta = place.empty_like("beta", d.beta);
  Owned dg = gradient_of(place, "g", d.g);
  Owned dA_log = gradient_of(place, "A_log", d.A_log);
  Owned ddt_bias = gradient_of(place, "dt_bias", d.dt_bias);
  Owned dC0 = gradient_of(place, "initial_state", d.C);
  tfla::DeltaBackward args{
      .q = views.input("q", d.q),
      .k = views.input("k", d.k),
      .v = views.input("v", d.v),
      .beta = views.input("beta", d.beta),
      .g = maybe_input(views, "g", d.g),
      .A_log = views.plain("A_log", d.A_log),
      .dt_bias = views.plain("dt_bias", d.dt_bias),
      .dh = views.input("dh", dh),
      .dq = views.output("dq", dq),
      .dk = views.output("dk", dk),
      .dv = views.output("dv", dv),
      .dbeta = views.output("dbeta", dbeta),
      .initial_state = views.plain("initial_state", d.C),
      .dlast_state = views.plain("dlast_state", dC),
      .cu_seqlens = views.plain("cu_seqlens", d.index),
      .options = d.options,
  };
  if (d.g) args.dg = views.output("dg", dg);
  if (d.A_log) args.dA_log = views.in_place("dA_log", dA_log);
  if (d.dt_bias) args.ddt_bias = views.in_place("ddt_bias", ddt_bias);
  if (d.C) args.dinitial_state = views.in_place("dinitial_state", dC0);
  run<tfla::DeltaBackward>(tfla::delta_plan(args, place.execution()), args, place, tfla::delta_backward);
  give(stack, std::move(dq), std::move(dk), std::move(dv), std::move(dbeta), std::move(dg), std::move(dA_log),
       std::move(ddt_bias), std::move(dC0));
}

void delta_rule_step(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Delta d = take_step(given);
  const Place place(d.q);
  const bool one_token = TensorRef(d.q).rank() == 3;
  const Views views(place, d.head_first && !one_token);
  const auto tokens = [&](auto view) { return one_token && view.rank > 0 ? with_token_axis(view) : view; };
  Owned h = place.empty_like("v", d.v);
  const tfla::DeltaStep args{
      .q = tokens(views.input("q", d.q)),
      .k = tokens(views.input("k", d.k)),
      .v = tokens(views.input("v", d.v)),
      .beta = tokens(views.input("beta", d.beta)),
      .g = tokens(maybe_input(views, "g", d.g)),
      .A_log = views.plain("A_log", d.A_log),
      .dt_bias = views.plain("dt_bias", d.dt_bias),
      .h = tokens(views.output("h", h)),
      .state = views.in_place("state", d.C),
      .slots = views.plain("slots", d.index),
      .options = d.options,
  };
  run<tfla::DeltaStep>(tfla::delta_plan(args, place.execution()), args, place, tfla::delta_step);
  give(stack, std::move(h));
}

// Schemas; python/tfla/_options.py has the same names, order and defaults, which a test compares.
#define TFLA_INPUTS \
  "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g=None, Tensor? A_log=None, Tensor? dt_bias=None"
#define TFLA_STEP_INPUTS \
  "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? A_log, Tensor? dt_bias, Tensor(a!) C"

// The options that sequences and steps have in common.
std::string family() {
  const tfla::DeltaOptions defaults;
  return ", int write=" + text(static_cast<int>(defaults.write)) +
         ", bool normalize_qk=" + text(defaults.normalize_qk) + ", bool head_first=False, float? qk_scale=None";
}

std::string of_sequences() {
  return TFLA_INPUTS ", Tensor? C=None, Tensor? cu_seqlens=None" + family() +
         ", int chunk_size=" + text(tfla::DeltaOptions{}.chunk_size) + ")";
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tfla, library) {
  const auto define = [&](const std::string& schema) { library.def(schema.c_str()); };
  define("delta_rule(" + of_sequences() + " -> Tensor");
  define("delta_rule_with_state(" + of_sequences() + " -> (Tensor, Tensor)");
  define("delta_rule_backward(Tensor dh, Tensor? dC, " + of_sequences() +
         " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("delta_rule_step(" TFLA_STEP_INPUTS ", Tensor? slots=None" + family() + ") -> Tensor");
}

#define TFLA_KERNELS(library)                                 \
  (library).impl("delta_rule", delta_rule<false>);            \
  (library).impl("delta_rule_with_state", delta_rule<true>);  \
  (library).impl("delta_rule_backward", delta_rule_backward); \
  (library).impl("delta_rule_step", delta_rule_step)

STABLE_TORCH_LIBRARY_IMPL(tfla, CPU, library) { TFLA_KERNELS(library); }
STABLE_TORCH_LIBRARY_IMPL(tfla, CUDA, library) { TFLA_KERNELS(library); }
