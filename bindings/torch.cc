// The operators as PyTorch sees them, through libtorch's stable ABI: one binary for every torch from 2.10 on, every
// Python, with and without CUDA. Nothing here but conversion; what is wrong with a call is found by tfla itself.
//
// Options travel as plain numbers (the values of tfla's enumerations), so that a graph can hold them. head_first says
// that tensors are (B,H,T,D), else (B,T,H,D). Shapes of outputs depend on shapes of inputs alone.
#include <torch/csrc/stable/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tfla/tfla.h"
#include "torch_call.h"
#include "torch_tensor.h"

namespace {

using tfla::binding::Arguments;
using tfla::binding::codes;
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

// The plan from shapes alone, so that arguments are validated once, when they are run. Where they are not of the kind a
// shape can be read from, validation comes first and says why.
template <class Args>
tfla::Plan plan_of(tfla::Operation operation, const Args& args, const Place& place) {
  bool packed = false;
  if constexpr (requires { args.cu_seqlens; }) packed = args.cu_seqlens.given();
  if (packed || args.q.rank != 4 || args.v.rank != 4) return tfla::plan(args, place.execution());
  tfla::Plan plan = tfla::plan(operation, tfla::shape_of(args), args.options, place.execution());
  if constexpr (requires { tfla::fits(plan, args); }) {
    if (!tfla::fits(plan, args)) plan = tfla::plan(args, place.execution());
  }
  return plan;
}

template <class Args>
void run(tfla::Operation operation, const Args& args, const Place& place,
         void (*function)(const Args&, const tfla::Plan&, std::span<std::byte>, void*)) {
  run(plan_of(operation, args, place), args, place, function);
}

template <class Call>
void take_tokens(Arguments& given, Call& call) {
  call.q = given.tensor("q");
  call.k = given.tensor("k");
  call.v = given.tensor("v");
  call.i = given.tensor("i");
  call.f = given.tensor("f");
}

// The options that sequences and steps have in common.
void take_family(Arguments& given, bool& head_first, tfla::MlstmOptions& options) {
  options.gate = enumerator<tfla::InputGate>(given.take<std::int64_t>());
  options.normalizer = enumerator<tfla::Normalizer>(given.take<std::int64_t>());
  head_first = given.take<bool>();
  options.eps = given.take<double>();
  options.qk_scale = given.take<std::optional<double>>();
  options.soft_cap = given.take<std::optional<double>>();
}

// What forward keeps where nobody says so: of the calls that have a backward, which are the ones that keep anything.
constexpr tfla::Keep default_keep = tfla::Keep::denominators;

// What is none of the enumeration's is left to validation.
void keep_nothing(tfla::MlstmOptions& options) {
  if (options.keep <= tfla::Keep::states) options.keep = tfla::Keep::nothing;
}

struct Sequence {
  Owned q, k, v, i, f, C, n, m, cu_seqlens;
  bool head_first = false;
  tfla::MlstmOptions options{.keep = default_keep};
};

// Every argument of an operator costs host time, one at its default too. So each operator that is called often has a
// form with nothing but its tensors, which has no derivative and a name that begins with an underscore.
enum class Form : std::uint8_t { whole, alone };

Sequence take_sequence(Arguments& given, Form form) {
  Sequence s;
  take_tokens(given, s);
  if (form == Form::whole) {
    for (Owned* tensor : {&s.C, &s.n, &s.m, &s.cu_seqlens}) *tensor = given.maybe_tensor();
    take_family(given, s.head_first, s.options);
    s.options.exact_normalizer_grad = given.take<bool>();
    s.options.chunk_size = given.take<std::int64_t>();
    s.options.keep = enumerator<tfla::Keep>(given.take<std::int64_t>());
    s.options.formulation = enumerator<tfla::Formulation>(given.take<std::int64_t>());
  }
  given.refuse_missing();
  return s;
}

tfla::MlstmForward forward_args(const Views& views, const Sequence& s, const Owned& h) {
  return {
      .q = views.input("q", s.q),
      .k = views.input("k", s.k),
      .v = views.input("v", s.v),
      .i = views.input("i", s.i),
      .f = views.input("f", s.f),
      .h = views.output("h", h),
      .initial_state = {views.plain("initial_state.C", s.C), views.plain("initial_state.n", s.n),
                        views.plain("initial_state.m", s.m)},
      .cu_seqlens = views.plain("cu_seqlens", s.cu_seqlens),
      .options = s.options,
  };
}

// What an operator returns after h.
struct Returns {
  bool last_state = false;  // C, n, m
  bool saved = false;       // what backward would compute again, as options.keep says: as many bytes as the plan has
};

struct LastState {
  Owned C, n, m;
};

LastState empty_last_state(const Place& place, const tfla::MlstmForward& args) {
  const std::int64_t states = count_states(args.cu_seqlens, args.v);
  const std::int64_t heads = args.v.shape[2];
  const std::int64_t dqk = args.q.shape[3];
  const std::int32_t dtype = state_dtype(args.q.dtype);
  return {place.empty(dtype, {states, heads, dqk, args.v.shape[3]}), place.empty(dtype, {states, heads, dqk}),
          place.empty(dtype, {states, heads})};
}

template <Form Which, Returns Results>
void mlstm(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  Sequence s = take_sequence(given, Which);
  if (!Results.saved) keep_nothing(s.options);
  const Place place(s.q);
  const Views views(place, s.head_first);
  Owned h = place.empty_like("v", s.v), saved;
  auto args = forward_args(views, s, h);
  LastState last;
  if constexpr (Results.last_state) {
    last = empty_last_state(place, args);
    args.last_state = {views.in_place("last_state.C", last.C), views.in_place("last_state.n", last.n),
                       views.in_place("last_state.m", last.m)};
  }
  const tfla::Plan plan = plan_of(tfla::Operation::forward, args, place);
  if constexpr (Results.saved) {
    saved = place.empty(codes().bytes, {static_cast<std::int64_t>(plan.saved_bytes)});
    args.saved = {static_cast<std::byte*>(TensorRef(saved).mutable_data()), plan.saved_bytes};
  }
  run<tfla::MlstmForward>(plan, args, place, tfla::forward);
  give(stack, std::move(h));
  if constexpr (Results.last_state) give(stack + 1, std::move(last.C), std::move(last.n), std::move(last.m));
  if constexpr (Results.saved) give(stack + (Results.last_state ? 4 : 1), std::move(saved));
}

// The recurrent formulation has no backward of its own: the gradient of the same function is computed chunkwise.
tfla::Formulation differentiable(tfla::Formulation formulation) {
  return formulation == tfla::Formulation::recurrent ? tfla::Formulation::chunkwise : formulation;
}

// dh, dC, dn, saved, then what forward takes; without what follows its tensors, dC and dn there is no gradient of a
// state. saved: as forward left it, of the same options, or none.
template <Form Which>
void mlstm_backward(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  Owned dh = given.tensor("dh"), dC, dn;
  if constexpr (Which == Form::whole) {
    dC = given.maybe_tensor();
    dn = given.maybe_tensor();
  }
  const Owned saved = given.maybe_tensor();
  Sequence s = take_sequence(given, Which);
  for (Owned* gradient : {&dh, &dC, &dn}) *gradient = with_contiguous_last_axis(std::move(*gradient));
  s.options.formulation = differentiable(s.options.formulation);
  const Place place(s.q);
  const Views views(place, s.head_first);
  Owned dq = place.empty_like("q", s.q);
  Owned dk = place.empty_like("k", s.k);
  Owned dv = place.empty_like("v", s.v);
  Owned di = place.empty_like("i", s.i);
  Owned df = place.empty_like("f", s.f);
  tfla::MlstmBackward args{
      .q = views.input("q", s.q),
      .k = views.input("k", s.k),
      .v = views.input("v", s.v),
      .i = views.input("i", s.i),
      .f = views.input("f", s.f),
      .dh = views.input("dh", dh),
      .dq = views.output("dq", dq),
      .dk = views.output("dk", dk),
      .dv = views.output("dv", dv),
      .di = views.output("di", di),
      .df = views.output("df", df),
      .initial_state = {views.plain("initial_state.C", s.C), views.plain("initial_state.n", s.n),
                        views.plain("initial_state.m", s.m)},
      .dlast_state = {views.plain("dlast_state.C", dC), views.plain("dlast_state.n", dn)},
      .cu_seqlens = views.plain("cu_seqlens", s.cu_seqlens),
      .options = s.options,
  };
  if (saved) {
    const TensorRef kept = saved;
    place.check("saved", kept);
    args.saved = {static_cast<const std::byte*>(kept.data()), static_cast<std::size_t>(kept.count())};
  } else {
    keep_nothing(args.options);
  }
  if constexpr (Which == Form::alone) {
    run<tfla::MlstmBackward>(tfla::Operation::backward, args, place, tfla::backward);
    give(stack, std::move(dq), std::move(dk), std::move(dv), std::move(di), std::move(df));
  } else {
    Owned dC0 = gradient_of(place, "initial_state.C", s.C), dn0 = gradient_of(place, "initial_state.n", s.n);
    if (s.C) args.dinitial_state.C = views.in_place("dinitial_state.C", dC0);
    if (s.n) args.dinitial_state.n = views.in_place("dinitial_state.n", dn0);
    run<tfla::MlstmBackward>(tfla::Operation::backward, args, place, tfla::backward);
    give(stack, std::move(dq), std::move(dk), std::move(dv), std::move(di), std::move(df), std::move(dC0),
         std::move(dn0));
  }
}

struct Step {
  Owned q, k, v, i, f, C, n, m, slots;
  bool head_first = false;
  tfla::MlstmOptions options;
};

Step take_step(Arguments& given, Form form) {
  Step s;
  take_tokens(given, s);
  s.C = given.tensor("state.C");
  s.n = given.tensor("state.n");
  s.m = given.tensor("state.m");
  if (form == Form::whole) {
    s.slots = given.maybe_tensor();
    take_family(given, s.head_first, s.options);
  }
  given.refuse_missing();
  return s;
}

template <Form Which>
void mlstm_step(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Step s = take_step(given, Which);
  const TensorRef q = s.q;
  const Place place(q);
  const bool one_token = q.rank() == 3;
  const Views views(place, s.head_first && !one_token);
  const auto tokens = [&](auto view) { return one_token ? with_token_axis(view) : view; };
  Owned h = place.empty_like("v", s.v);
  const tfla::MlstmStep args{
      .q = tokens(views.input("q", q)),
      .k = tokens(views.input("k", s.k)),
      .v = tokens(views.input("v", s.v)),
      .i = tokens(views.input("i", s.i)),
      .f = tokens(views.input("f", s.f)),
      .h = tokens(views.output("h", h)),
      .state = {views.in_place("state.C", s.C), views.in_place("state.n", s.n), views.in_place("state.m", s.m)},
      .slots = views.plain("slots", s.slots),
      .options = s.options,
  };
  run<tfla::MlstmStep>(tfla::Operation::step, args, place, tfla::step);
  give(stack, std::move(h));
}

// Schemas. Their defaults are those of MlstmOptions, so that callers leave out what they do not change: every argument
// costs host time. python/tfla/_options.py has the same names, order and defaults, which a test compares.
#define TFLA_INPUTS "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f"
#define TFLA_INITIAL ", Tensor? C=None, Tensor? n=None, Tensor? m=None, Tensor? cu_seqlens=None"
#define TFLA_STATE ", Tensor(a!) C, Tensor(b!) n, Tensor(c!) m"

// The options that sequences and steps have in common.
std::string family() {
  const tfla::MlstmOptions defaults;
  return ", int gate=" + text(static_cast<int>(defaults.gate)) +
         ", int normalizer=" + text(static_cast<int>(defaults.normalizer)) +
         ", bool head_first=False, float eps=" + text(defaults.eps) + ", float? qk_scale=None, float? soft_cap=None";
}

std::string of_sequences() {
  const tfla::MlstmOptions defaults;
  return TFLA_INPUTS TFLA_INITIAL + family() + ", bool exact_normalizer_grad=" + text(defaults.exact_normalizer_grad) +
         ", int chunk_size=" + text(defaults.chunk_size) + ", int keep=" + text(static_cast<int>(default_keep)) +
         ", int formulation=" + text(static_cast<int>(defaults.formulation)) + ")";
}

}  // namespace

STABLE_TORCH_LIBRARY(tfla, library) {
  const auto define = [&](const std::string& schema) { library.def(schema.c_str()); };
  define("mlstm(" + of_sequences() + " -> Tensor");
  define("_mlstm(" TFLA_INPUTS ") -> Tensor");
  define("mlstm_with_saved(" + of_sequences() + " -> (Tensor, Tensor)");
  define("_mlstm_with_saved(" TFLA_INPUTS ") -> (Tensor, Tensor)");
  define("mlstm_with_state(" + of_sequences() + " -> (Tensor, Tensor, Tensor, Tensor)");
  define("mlstm_with_state_and_saved(" + of_sequences() + " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("mlstm_backward(Tensor dh, Tensor? dC, Tensor? dn, Tensor? saved, " + of_sequences() +
         " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("_mlstm_backward(Tensor dh, Tensor? saved, " TFLA_INPUTS ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("mlstm_step(" TFLA_INPUTS TFLA_STATE ", Tensor? slots=None" + family() + ") -> Tensor");
  define("_mlstm_step(" TFLA_INPUTS TFLA_STATE ") -> Tensor");
}

#define TFLA_KERNELS(library)                                                                                   \
  (library).impl("mlstm", mlstm<Form::whole, Returns{}>);                                                       \
  (library).impl("_mlstm", mlstm<Form::alone, Returns{}>);                                                      \
  (library).impl("mlstm_with_saved", mlstm<Form::whole, Returns{.saved = true}>);                               \
  (library).impl("_mlstm_with_saved", mlstm<Form::alone, Returns{.saved = true}>);                              \
  (library).impl("mlstm_with_state", mlstm<Form::whole, Returns{.last_state = true}>);                          \
  (library).impl("mlstm_with_state_and_saved", mlstm<Form::whole, Returns{.last_state = true, .saved = true}>); \
  (library).impl("mlstm_backward", mlstm_backward<Form::whole>);                                                \
  (library).impl("_mlstm_backward", mlstm_backward<Form::alone>);                                               \
  (library).impl("mlstm_step", mlstm_step<Form::whole>);                                                        \
  (library).impl("_mlstm_step", mlstm_step<Form::alone>)

STABLE_TORCH_LIBRARY_IMPL(tfla, CPU, library) { TFLA_KERNELS(library); }
STABLE_TORCH_LIBRARY_IMPL(tfla, CUDA, library) { TFLA_KERNELS(library); }
