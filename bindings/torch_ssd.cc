// The state space dual as PyTorch sees it; torch.cc says how options travel.
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
using tfla::binding::codes;
using tfla::binding::count_states;
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

// What all operators take. S: the state; index: cu_seqlens of sequences, slots of steps.
struct Ssd {
  Owned x, dt, A, B, C, D, z, dt_bias, S, index, seq_idx;
  tfla::SsdOptions options;
};

void take_tokens(Arguments& given, Ssd& s) {
  s.x = given.tensor("x");
  s.dt = given.tensor("dt");
  s.A = given.tensor("A");
  s.B = given.tensor("B");
  s.C = given.tensor("C");
}
void take_rest(Arguments& given, Ssd& s) {
  for (Owned* tensor : {&s.D, &s.z, &s.dt_bias}) *tensor = given.maybe_tensor();
}

void take_steps(Arguments& given, Ssd& s) {
  s.options.dt_softplus = given.take<bool>();
  s.options.dt_min = given.take<double>();
  s.options.dt_max = given.take<std::optional<double>>().value_or(s.options.dt_max);
}

Ssd take_sequence(Arguments& given) {
  Ssd s;
  take_tokens(given, s);
  take_rest(given, s);
  s.S = given.maybe_tensor();
  s.index = given.maybe_tensor();
  s.seq_idx = given.maybe_tensor();
  take_steps(given, s);
  s.options.chunk_size = given.take<std::int64_t>();
  return s;
}

// One that was not asked for is an empty tensor.
Owned nothing(const Place& place) { return place.empty(codes().float32, {0}); }

// y, the last state where it is asked for, and y before silu(z) where that is kept for backward.
void ssd(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Ssd s = take_sequence(given);
  const bool with_state = given.take<bool>(), keep = given.take<bool>();
  given.refuse_missing();
  const Place place(s.x, "x");
  const Views views(place, false);
  Owned y = place.empty_like("x", s.x), last = nothing(place), ungated = nothing(place);
  tfla::SsdForward args{
      .x = views.input("x", s.x),
      .dt = views.input("dt", s.dt),
      .A = views.plain("A", s.A),
      .B = views.input("B", s.B),
      .C = views.input("C", s.C),
      .D = views.plain("D", s.D),
      .z = views.plain("z", s.z),
      .dt_bias = views.plain("dt_bias", s.dt_bias),
      .y = views.output("y", y),
      .initial_state = views.plain("initial_state", s.S),
      .cu_seqlens = views.plain("cu_seqlens", s.index),
      .seq_idx = views.plain("seq_idx", s.seq_idx),
      .options = s.options,
  };
  if (keep && s.z) {
    ungated = place.empty_like("x", s.x);
    args.ungated = views.output("ungated", ungated);
  }
  if (with_state) {
    const std::int64_t states = count_states(args.cu_seqlens, args.x);
    last = place.empty(state_dtype(args.x.dtype), {states, args.x.shape[2], args.x.shape[3], args.B.shape[3]});
    args.last_state = views.in_place("last_state", last);
  }
  run<tfla::SsdForward>(tfla::ssd_plan(args, place.execution()), args, place, tfla::ssd_forward);
  give(stack, std::move(y), std::move(last), std::move(ungated));
}

// dy, dS and ungated, then what forward takes without what it is asked for.
void ssd_backward(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  Owned dy = given.tensor("dy"), dS = given.maybe_tensor();
  const Owned ungated = given.maybe_tensor();
  const Ssd s = take_sequence(given);
  given.refuse_missing();
  dy = with_contiguous_last_axis(std::move(dy));
  const Place place(s.x, "x");
  const Views views(place, false);
  Owned dx = place.empty_like("x", s.x), ddt = place.empty_like("dt", s.dt), dA = place.empty_like("A", s.A);
  Owned dB = place.empty_like("B", s.B), dC = place.empty_like("C", s.C), dD = gradient_of(place, "D", s.D);
  Owned dz = gradient_of(place, "z", s.z), ddt_bias = gradient_of(place, "dt_bias", s.dt_bias);
  Owned dS0 = gradient_of(place, "initial_state", s.S);
  tfla::SsdBackward args{
      .x = views.input("x", s.x),
      .dt = views.input("dt", s.dt),
      .A = views.plain("A", s.A),
      .B = views.input("B", s.B),
      .C = views.input("C", s.C),
      .D = views.plain("D", s.D),
      .z = views.plain("z", s.z),
      .dt_bias = views.plain("dt_bias", s.dt_bias),
      .ungated = views.plain("ungated", ungated),
      .dy = views.input("dy", dy),
      .dx = views.output("dx", dx),
      .ddt = views.output("ddt", ddt),
      .dA = views.in_place("dA", dA),
      .dB = views.output("dB", dB),
      .dC = views.output("dC", dC),
      .initial_state = views.plain("initial_state", s.S),
      .dlast_state = views.plain("dlast_state", dS),
      .cu_seqlens = views.plain("cu_seqlens", s.index),
      .seq_idx = views.plain("seq_idx", s.seq_idx),
      .options = s.options,
  };
  if (s.D) args.dD = views.in_place("dD", dD);
  if (s.z) args.dz = views.output("dz", dz);
  if (s.dt_bias) args.ddt_bias = views.in_place("ddt_bias", ddt_bias);
  if (s.S) args.dinitial_state = views.in_place("dinitial_state", dS0);
  run<tfla::SsdBackward>(tfla::ssd_plan(args, place.execution()), args, place, tfla::ssd_backward);
  give(stack, std::move(dx), std::move(ddt), std::move(dA), std::move(dB), std::move(dC), std::move(dD), std::move(dz),
       std::move(ddt_bias), std::move(dS0));
}

void ssd_step(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  Ssd s;
  take_tokens(given, s);
  s.S = given.tensor("state");
  take_rest(given, s);
  s.index = given.maybe_tensor();
  take_steps(given, s);
  given.refuse_missing();
  const Place place(s.x, "x");
  const bool one_token = TensorRef(s.x).rank() == 3;
  const Views views(place, false);
  const auto tokens = [&](auto view) { return one_token && view.rank > 0 ? with_token_axis(view) : view; };
  Owned y = place.empty_like("x", s.x);
  const tfla::SsdStep args{
      .x = tokens(views.input("x", s.x)),
      .dt = tokens(views.input("dt", s.dt)),
      .A = views.plain("A", s.A),
      .B = tokens(views.input("B", s.B)),
      .C = tokens(views.input("C", s.C)),
      .D = views.plain("D", s.D),
      .z = tokens(views.plain("z", s.z)),
      .dt_bias = views.plain("dt_bias", s.dt_bias),
      .y = tokens(views.output("y", y)),
      .state = views.in_place("state", s.S),
      .slots = views.plain("slots", s.index),
      .options = s.options,
  };
  run<tfla::SsdStep>(tfla::ssd_plan(args, place.execution()), args, place, tfla::ssd_step);
  give(stack, std::move(y));
}

#define TFLA_INPUTS \
  "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None"
#define TFLA_STEP_INPUTS                                                                                      \
  "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) S, Tensor? D=None, Tensor? z=None, Tensor? " \
  "dt_bias=None"

// The options that sequences and steps have in common. No dt_max is infinity, which a schema cannot say.
std::string steps() {
  const tfla::SsdOptions defaults;
  return ", bool dt_softplus=" + text(defaults.dt_softplus) + ", float dt_min=" + text(defaults.dt_min) +
         ", float? dt_max=None";
}

std::string of_sequences() {
  return TFLA_INPUTS ", Tensor? S=None, Tensor? cu_seqlens=None, Tensor? seq_idx=None" + steps() +
         ", int chunk_size=" + text(tfla::SsdOptions{}.chunk_size);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tfla, library) {
  const auto define = [&](const std::string& schema) { library.def(schema.c_str()); };
  define("ssd(" + of_sequences() + ", bool with_state=False, bool keep=False) -> (Tensor, Tensor, Tensor)");
  define("ssd_backward(Tensor dy, Tensor? dS, Tensor? ungated, " + of_sequences() +
         ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("ssd_step(" TFLA_STEP_INPUTS ", Tensor? slots=None" + steps() + ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tfla, CPU, library) {
  library.impl("ssd", ssd);
  library.impl("ssd_backward", ssd_backward);
  library.impl("ssd_step", ssd_step);
}
