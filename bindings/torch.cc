// The operators as PyTorch sees them, through libtorch's stable ABI: one binary for every torch from 2.10 on, every
// Python, with and without CUDA. Nothing here but conversion; what is wrong with a call is found by tfla itself.
//
// Options travel as plain numbers (the values of tfla's enumerations), so that a graph can hold them. head_first says
// that tensors are (B,H,T,D), else (B,T,H,D). Shapes of outputs depend on shapes of inputs alone.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <tuple>

#include "tfla/tfla.h"
#include "torch_tensor.h"

namespace {

using tfla::InvalidArgument;
using tfla::binding::codes;
using tfla::binding::MaybeTensor;
using tfla::binding::Place;
using tfla::binding::Tensor;
using tfla::binding::TensorRef;
using tfla::binding::Views;

// A number that is none of the enumeration's stays none of them, for validation to refuse.
template <class Enumeration>
Enumeration enumerator(std::int64_t value) {
  return static_cast<Enumeration>(value < 0 || value > 255 ? 255 : value);
}

tfla::MlstmOptions options_of(std::int64_t gate, std::int64_t normalizer, double eps, std::optional<double> qk_scale,
                              std::optional<double> soft_cap, bool exact_normalizer_grad, std::int64_t chunk_size,
                              std::int64_t formulation) {
  return {.gate = enumerator<tfla::InputGate>(gate),
          .normalizer = enumerator<tfla::Normalizer>(normalizer),
          .eps = eps,
          .qk_scale = qk_scale,
          .soft_cap = soft_cap,
          .exact_normalizer_grad = exact_normalizer_grad,
          .chunk_size = chunk_size,
          .formulation = enumerator<tfla::Formulation>(formulation)};
}

// The plan from shapes alone, so that arguments are validated once, when they are run. Where they are not of the kind a
// shape can be read from, validation comes first and says why.
template <class Args>
tfla::Plan plan_of(tfla::Operation operation, const Args& args, const Place& place) {
  bool packed = false;
  if constexpr (requires { args.cu_seqlens; }) packed = args.cu_seqlens.given();
  if (packed || args.q.rank != 4 || args.v.rank != 4) return tfla::plan(args, place.execution());
  const tfla::MlstmShape shape{.batch = args.q.shape[0],
                               .tokens = args.q.shape[1],
                               .qk_heads = args.q.shape[2],
                               .heads = args.v.shape[2],
                               .dqk = args.q.shape[3],
                               .dhv = args.v.shape[3],
                               .sequences = args.q.shape[0],
                               .longest = args.q.shape[1],
                               .dtype = args.q.dtype,
                               .gate_dtype = args.i.dtype};
  tfla::Plan plan = tfla::plan(operation, shape, args.options, place.execution());
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
      TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &memory));
      memory_ = static_cast<std::byte*>(memory);
      cuda_ = true;
    } else if (cuda || bytes > kept_bytes) {
      tensor_ = place.empty(codes().bytes, {static_cast<std::int64_t>(bytes)});
      memory_ = static_cast<std::byte*>(tensor_->mutable_data_ptr());
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
  MaybeTensor tensor_;
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

// Gradients arrive in any strides; tfla reads rows.
Tensor with_rows(const Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  return last < 0 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}
MaybeTensor with_rows(const MaybeTensor& tensor) { return tensor ? MaybeTensor(with_rows(*tensor)) : tensor; }

tfla::MlstmForward forward_args(const Views& views, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i,
                                const Tensor& f, const MaybeTensor& C, const MaybeTensor& n, const MaybeTensor& m,
                                const MaybeTensor& cu_seqlens, const Tensor& h, const tfla::MlstmOptions& options) {
  return {
      .q = views.input("q", q),
      .k = views.input("k", k),
      .v = views.input("v", v),
      .i = views.input("i", i),
      .f = views.input("f", f),
      .h = views.output("h", h),
      .initial_state = {views.plain("initial_state.C", C), views.plain("initial_state.n", n),
                        views.plain("initial_state.m", m)},
      .cu_seqlens = views.plain("cu_seqlens", cu_seqlens),
      .options = options,
  };
}

Tensor mlstm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f, const MaybeTensor& C,
             const MaybeTensor& n, const MaybeTensor& m, const MaybeTensor& cu_seqlens, std::int64_t gate,
             std::int64_t normalizer, bool head_first, double eps, std::optional<double> qk_scale,
             std::optional<double> soft_cap, bool exact_normalizer_grad, std::int64_t chunk_size,
             std::int64_t formulation) {
  const Place place(q);
  const Tensor h = place.empty_like("v", v);
  const auto options =
      options_of(gate, normalizer, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size, formulation);
  const auto args = forward_args(Views(place, head_first), q, k, v, i, f, C, n, m, cu_seqlens, h, options);
  run<tfla::MlstmForward>(tfla::Operation::forward, args, place, tfla::forward);
  return h;
}

// The same with what backward would compute again: h, rows.
std::tuple<Tensor, Tensor> mlstm_with_rows(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i,
                                           const Tensor& f, const MaybeTensor& C, const MaybeTensor& n,
                                           const MaybeTensor& m, const MaybeTensor& cu_seqlens, std::int64_t gate,
                                           std::int64_t normalizer, bool head_first, double eps,
                                           std::optional<double> qk_scale, std::optional<double> soft_cap,
                                           bool exact_normalizer_grad, std::int64_t chunk_size,
                                           std::int64_t formulation) {
  const Place place(q);
  const Tensor h = place.empty_like("v", v);
  auto options = options_of(gate, normalizer, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size, formulation);
  options.keep_rows = true;
  auto args = forward_args(Views(place, head_first), q, k, v, i, f, C, n, m, cu_seqlens, h, options);
  const tfla::Plan plan = plan_of(tfla::Operation::forward, args, place);
  const Tensor rows = place.empty(codes().bytes, {static_cast<std::int64_t>(plan.saved_bytes)});
  args.saved = {static_cast<std::byte*>(rows.mutable_data_ptr()), plan.saved_bytes};
  run<tfla::MlstmForward>(plan, args, place, tfla::forward);
  return {h, rows};
}

// The same with the last state: h, C, n, m.
std::tuple<Tensor, Tensor, Tensor, Tensor> mlstm_with_state(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f, const MaybeTensor& C,
    const MaybeTensor& n, const MaybeTensor& m, const MaybeTensor& cu_seqlens, std::int64_t gate,
    std::int64_t normalizer, bool head_first, double eps, std::optional<double> qk_scale,
    std::optional<double> soft_cap, bool exact_normalizer_grad, std::int64_t chunk_size, std::int64_t formulation) {
  const Place place(q);
  const Views views(place, head_first);
  const Tensor h = place.empty_like("v", v);
  const auto options =
      options_of(gate, normalizer, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size, formulation);
  auto args = forward_args(views, q, k, v, i, f, C, n, m, cu_seqlens, h, options);
  const std::int64_t states = args.cu_seqlens.given() ? args.cu_seqlens.shape[0] - 1 : args.v.shape[0];
  if (states < 0) throw InvalidArgument("tfla: cu_seqlens is empty; it must hold at least the 0 it begins with");
  const std::int64_t heads = args.v.shape[2];
  const std::int64_t dqk = args.q.shape[3];
  const std::int32_t dtype = args.q.dtype == tfla::DType::float64 ? codes().float64 : codes().float32;
  const Tensor last_C = place.empty(dtype, {states, heads, dqk, args.v.shape[3]});
  const Tensor last_n = place.empty(dtype, {states, heads, dqk});
  const Tensor last_m = place.empty(dtype, {states, heads});
  args.last_state = {views.in_place("last_state.C", last_C), views.in_place("last_state.n", last_n),
                     views.in_place("last_state.m", last_m)};
  run<tfla::MlstmForward>(tfla::Operation::forward, args, place, tfla::forward);
  return {h, last_C, last_n, last_m};
}

// The recurrent formulation has no backward of its own: the gradient of the same function is computed chunkwise.
std::int64_t differentiable(std::int64_t formulation) {
  constexpr auto recurrent = static_cast<std::int64_t>(tfla::Formulation::recurrent);
  return formulation == recurrent ? static_cast<std::int64_t>(tfla::Formulation::chunkwise) : formulation;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// rows: as mlstm_with_rows left them, or none.
Gradients mlstm_backward(const Tensor& dh, const MaybeTensor& dC, const MaybeTensor& dn, const MaybeTensor& rows,
                         const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                         const MaybeTensor& C, const MaybeTensor& n, const MaybeTensor& m,
                         const MaybeTensor& cu_seqlens, std::int64_t gate, std::int64_t normalizer, bool head_first,
                         double eps, std::optional<double> qk_scale, std::optional<double> soft_cap,
                         bool exact_normalizer_grad, std::int64_t chunk_size, std::int64_t formulation) {
  const Place place(q);
  const Views views(place, head_first);
  const Tensor dh_rows = with_rows(dh);
  const MaybeTensor dC_rows = with_rows(dC);
  const MaybeTensor dn_rows = with_rows(dn);
  const Tensor dq = place.empty_like("q", q);
  const Tensor dk = place.empty_like("k", k);
  const Tensor dv = place.empty_like("v", v);
  const Tensor di = place.empty_like("i", i);
  const Tensor df = place.empty_like("f", f);
  const Tensor dC0 = C ? place.empty_like("initial_state.C", *C) : place.nothing();
  const Tensor dn0 = n ? place.empty_like("initial_state.n", *n) : place.nothing();
  tfla::MlstmBackward args{
      .q = views.input("q", q),
      .k = views.input("k", k),
      .v = views.input("v", v),
      .i = views.input("i", i),
      .f = views.input("f", f),
      .dh = views.input("dh", dh_rows),
      .dq = views.output("dq", dq),
      .dk = views.output("dk", dk),
      .dv = views.output("dv", dv),
      .di = views.output("di", di),
      .df = views.output("df", df),
      .initial_state = {views.plain("initial_state.C", C), views.plain("initial_state.n", n),
                        views.plain("initial_state.m", m)},
      .dlast_state = {views.plain("dlast_state.C", dC_rows), views.plain("dlast_state.n", dn_rows)},
      .cu_seqlens = views.plain("cu_seqlens", cu_seqlens),
      .options = options_of(gate, normalizer, eps, qk_scale, soft_cap, exact_normalizer_grad, chunk_size,
                            differentiable(formulation)),
  };
  if (C) args.dinitial_state.C = views.in_place("dinitial_state.C", dC0);
  if (n) args.dinitial_state.n = views.in_place("dinitial_state.n", dn0);
  if (rows) {
    place.check("rows", *rows);
    args.options.keep_rows = true;
    args.saved = {static_cast<const std::byte*>(rows->const_data_ptr()), static_cast<std::size_t>(rows->numel())};
  }
  run<tfla::MlstmBackward>(tfla::Operation::backward, args, place, tfla::backward);
  return {dq, dk, dv, di, df, dC0, dn0};
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

// A step is called for every token, so its tensors stay handles: torch::stable::Tensor puts a shared pointer with a
// count of its own around each. What a kernel finds on the stack is its own, to be freed here.
struct Free {
  void operator()(AtenTensorHandle handle) const { (void)aoti_torch_delete_tensor_object(handle); }
};
using Owned = std::unique_ptr<AtenTensorOpaque, Free>;

struct StepTensors {
  Owned q, k, v, i, f, C, n, m, slots;
};

StableIValue step(const StepTensors& given, bool head_first, const tfla::MlstmOptions& options) {
  const TensorRef q = given.q.get();
  const Place place(q);
  const bool one_token = q.rank() == 3;
  const Views views(place, head_first && !one_token);
  const auto tokens = [&](auto view) { return one_token ? with_token_axis(view) : view; };
  Owned h(place.new_empty_like("v", given.v.get()));
  const tfla::MlstmStep args{
      .q = tokens(views.input("q", q)),
      .k = tokens(views.input("k", given.k.get())),
      .v = tokens(views.input("v", given.v.get())),
      .i = tokens(views.input("i", given.i.get())),
      .f = tokens(views.input("f", given.f.get())),
      .h = tokens(views.output("h", h.get())),
      .state = {views.in_place("state.C", given.C.get()), views.in_place("state.n", given.n.get()),
                views.in_place("state.m", given.m.get())},
      .slots = given.slots ? views.plain("slots", TensorRef(given.slots.get())) : tfla::TensorView(),
      .options = options,
  };
  run<tfla::MlstmStep>(tfla::Operation::step, args, place, tfla::step);
  return torch::stable::detail::from<AtenTensorHandle>(h.release());
}

StepTensors step_tensors(const StableIValue* stack) {
  using torch::stable::detail::to;
  const auto next = [&stack] { return Owned(to<AtenTensorHandle>(*stack++)); };
  return {next(), next(), next(), next(), next(), next(), next(), next(), nullptr};
}
constexpr int step_tensor_count = 8;

void mlstm_step(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  using torch::stable::detail::to;
  StepTensors given = step_tensors(stack);
  const StableIValue* option = stack + step_tensor_count;
  given.slots.reset(to<std::optional<AtenTensorHandle>>(*option++).value_or(nullptr));
  const auto gate = to<std::int64_t>(*option++);
  const auto normalizer = to<std::int64_t>(*option++);
  const auto head_first = to<bool>(*option++);
  const auto eps = to<double>(*option++);
  const auto qk_scale = to<std::optional<double>>(*option++);
  const auto soft_cap = to<std::optional<double>>(*option++);
  stack[0] = step(given, head_first, options_of(gate, normalizer, eps, qk_scale, soft_cap, false, 0, 0));
}

// The same with nothing but its tensors: every argument of an operator costs host time, one at its default too.
void mlstm_step_alone(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  stack[0] = step(step_tensors(stack), false, {});
}

}  // namespace

// Defaults are here so that callers leave out what they do not change: every argument costs host time.
#define TFLA_INPUTS "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f"
#define TFLA_INITIAL ", Tensor? C=None, Tensor? n=None, Tensor? m=None, Tensor? cu_seqlens=None"
#define TFLA_FAMILY \
  ", int gate=0, int normalizer=0, bool head_first=False, float eps=1e-6, float? qk_scale=None, float? soft_cap=None"
#define TFLA_STATE ", Tensor(a!) C, Tensor(b!) n, Tensor(c!) m"
#define TFLA_TRAINING ", bool exact_normalizer_grad=False, int chunk_size=0, int formulation=0"
#define TFLA_SEQUENCE "(" TFLA_INPUTS TFLA_INITIAL TFLA_FAMILY TFLA_TRAINING ")"

STABLE_TORCH_LIBRARY(tfla, library) {
  library.def("mlstm" TFLA_SEQUENCE " -> Tensor");
  library.def("mlstm_with_rows" TFLA_SEQUENCE " -> (Tensor, Tensor)");
  library.def("mlstm_with_state" TFLA_SEQUENCE " -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("mlstm_backward(Tensor dh, Tensor? dC, Tensor? dn, Tensor? rows, " TFLA_INPUTS TFLA_INITIAL TFLA_FAMILY
                  TFLA_TRAINING ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("mlstm_step(" TFLA_INPUTS TFLA_STATE ", Tensor? slots=None" TFLA_FAMILY ") -> Tensor");
  library.def("mlstm_step.alone(" TFLA_INPUTS TFLA_STATE ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tfla, CPU, library) {
  library.impl("mlstm", TORCH_BOX(&mlstm));
  library.impl("mlstm_with_rows", TORCH_BOX(&mlstm_with_rows));
  library.impl("mlstm_with_state", TORCH_BOX(&mlstm_with_state));
  library.impl("mlstm_backward", TORCH_BOX(&mlstm_backward));
  library.impl("mlstm_step", mlstm_step);
  library.impl("mlstm_step.alone", mlstm_step_alone);
}

STABLE_TORCH_LIBRARY_IMPL(tfla, CUDA, library) {
  library.impl("mlstm", TORCH_BOX(&mlstm));
  library.impl("mlstm_with_rows", TORCH_BOX(&mlstm_with_rows));
  library.impl("mlstm_with_state", TORCH_BOX(&mlstm_with_state));
  library.impl("mlstm_backward", TORCH_BOX(&mlstm_backward));
  library.impl("mlstm_step", mlstm_step);
  library.impl("mlstm_step.alone", mlstm_step_alone);
}
