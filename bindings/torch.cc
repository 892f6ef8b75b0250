// The operators as PyTorch sees them, through libtorch's stable ABI: one binary for every torch from 2.10 on, every
// Python, with and without CUDA. Nothing here but conversion; what is wrong with a call is found by tfla itself.
//
// Options travel as plain numbers (the values of tfla's enumerations), so that a graph can hold them. head_first says
// that tensors are (B,H,T,D), else (B,T,H,D). Shapes of outputs depend on shapes of inputs alone.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "tfla/tfla.h"
#include "torch_tensor.h"

namespace {

using tfla::InvalidArgument;
using tfla::binding::check_allocation;
using tfla::binding::codes;
using tfla::binding::Owned;
using tfla::binding::Place;
using tfla::binding::Tensor;
using tfla::binding::TensorRef;
using tfla::binding::Views;

// A number that is none of the enumeration's stays none of them, for validation to refuse.
template <class Enumeration>
Enumeration enumerator(std::int64_t value) {
  return static_cast<Enumeration>(value < 0 || value > 255 ? 255 : value);
}

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

// Memory for the length of one call: from torch's allocator, on a GPU for the current stream and, where torch offers
// that, without a tensor around it, or on the CPU, where little is needed, a block that each thread keeps (large blocks
// cost malloc microseconds).
class Scratch {
 public:
  Scratch(std::size_t bytes, const Place& place) : bytes_(bytes) {
    if (bytes == 0) return;
    const bool cuda = place.execution().device == tfla::Device::cuda;
    if (cuda && aoti_torch_cuda_caching_allocator_raw_alloc != nullptr) {
      void* memory = nullptr;
      check_allocation(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &memory), cuda);
      memory_ = static_cast<std::byte*>(memory);
      cuda_ = true;
    } else if (cuda || bytes > kept_bytes) {
      tensor_ = place.empty(codes().bytes, {static_cast<std::int64_t>(bytes)});
      memory_ = static_cast<std::byte*>(TensorRef(tensor_).mutable_data());
    } else {
      thread_local const std::unique_ptr<Kept> kept(new Kept);
      memory_ = kept->bytes.data();
    }
  }
  ~Scratch() {
    if (cuda_) aoti_torch_cuda_caching_allocator_raw_delete(memory_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return {memory_, bytes_}; }

 private:
  static constexpr std::size_t kept_bytes = std::size_t{1} << 18;
  struct alignas(tfla::scratch_alignment) Kept {
    std::array<std::byte, kept_bytes> bytes;
  };

  std::size_t bytes_;
  std::byte* memory_ = nullptr;
  bool cuda_ = false;
  Owned tensor_;
};

template <class Args>
void run(const tfla::Plan& plan, const Args& args, const Place& place,
         void (*function)(const Args&, const tfla::Plan&, std::span<std::byte>, void*)) {
  const Scratch scratch(plan.scratch_bytes, place);
  function(args, plan, scratch.bytes(), place.execution().stream);
}

template <class Args>
void run(tfla::Operation operation, const Args& args, const Place& place,
         void (*function)(const Args&, const tfla::Plan&, std::span<std::byte>, void*)) {
  run(plan_of(operation, args, place), args, place, function);
}

// Arguments of an operator, one after the other.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  template <class Value>
  Value take() {
    return torch::stable::detail::to<Value>(*next_++);
  }
  // The dispatcher lets None pass for a tensor. It is refused when all arguments are taken, since they are ours to
  // free.
  Owned tensor(const char* name) {
    Owned tensor(take<AtenTensorHandle>());
    if (missing_ == nullptr && !TensorRef(tensor).defined()) missing_ = name;
    return tensor;
  }
  Owned maybe_tensor() { return Owned(take<std::optional<AtenTensorHandle>>().value_or(nullptr)); }
  void refuse_missing() const {
    if (missing_ != nullptr)
      throw InvalidArgument(std::string("tfla: ") + missing_ + " is missing; it must be a tensor");
  }

 private:
  const StableIValue* next_;
  const char* missing_ = nullptr;
};

// Results, over the arguments, which have been taken by then.
template <class... Tensors>
void give(StableIValue* stack, Tensors... results) {
  ((*stack++ = torch::stable::detail::from<AtenTensorHandle>(results.release())), ...);
}

// Gradients arrive in any strides; tfla takes any but of the last axis.
Owned with_contiguous_last_axis(Owned tensor) {
  if (!tensor) return tensor;
  const std::int64_t rank = TensorRef(tensor).rank();
  if (rank == 0 || TensorRef(tensor).strides()[rank - 1] == 1) return tensor;
  const Tensor contiguous = torch::stable::contiguous(Tensor(tensor.release()));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(contiguous.get(), &handle));
  return Owned(handle);
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
  const std::int64_t states = args.cu_seqlens.given() ? args.cu_seqlens.shape[0] - 1 : args.v.shape[0];
  if (states < 0) throw InvalidArgument("tfla: cu_seqlens is empty; it must hold at least the 0 it begins with");
  const std::int64_t heads = args.v.shape[2];
  const std::int64_t dqk = args.q.shape[3];
  const std::int32_t dtype = args.q.dtype == tfla::DType::float64 ? codes().float64 : codes().float32;
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
    const auto gradient = [&](const char* name, const Owned& state) {
      return state ? place.empty_like(name, state) : place.empty(codes().float32, {0});
    };
    Owned dC0 = gradient("initial_state.C", s.C), dn0 = gradient("initial_state.n", s.n);
    if (s.C) args.dinitial_state.C = views.in_place("dinitial_state.C", dC0);
    if (s.n) args.dinitial_state.n = views.in_place("dinitial_state.n", dn0);
    run<tfla::MlstmBackward>(tfla::Operation::backward, args, place, tfla::backward);
    give(stack, std::move(dq), std::move(dk), std::move(dv), std::move(di), std::move(df), std::move(dC0),
         std::move(dn0));
  }
}

// One token as (B,H,D) or (B,H) becomes a token axis of one.
template <class View>
View with_token_axis(View view) {
  if (view.rank == View::max_rank) return view;  // too many axes already: left to validation
  for (int axis = view.rank++; axis > 1; --axis) {
    view.shape.at(axis) = view.shape.at(axis - 1);
    view.strides.at(axis) = view.strides.at(axis - 1);
  }
  view.shape[1] = 1;
  view.strides[1] = 0;
  return view;
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

template <class Value>
std::string text(Value value) {
  if constexpr (std::is_same_v<Value, bool>) {
    return value ? "True" : "False";
  } else {
    std::array<char, 32> digits{};
    return std::string(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr);
  }
}

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
