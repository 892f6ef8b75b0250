#include "tests/fuzz/input.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "reference/regimes.h"
#include "testkit/tensor.h"
#include "tfla/tfla.h"

namespace tfla::test {
namespace {

constexpr std::size_t arena_size = 32768;
alignas(64) std::array<std::byte, arena_size> arena;

// Bytes of the input, then zeros.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t next() { return at_ < size_ ? data_[at_++] : 0; }
  std::int64_t below(std::int64_t limit) { return next() % limit; }
  bool chance(int one_in) { return next() % one_in == 1; }
  std::int64_t wide() {
    std::uint64_t value = 0;
    for (int byte = 0; byte < 8; ++byte) value = value << 8 | next();
    return static_cast<std::int64_t>(value);
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

// ---------------------------------------------------------------- all views of a call

enum class Kind : std::uint8_t { input, output, index };

template <class Args, class Visit>
void visit_inputs(Args& a, const Visit& visit) {
  visit(a.q, Kind::input);
  visit(a.k, Kind::input);
  visit(a.v, Kind::input);
  if constexpr (requires { a.beta; }) {
    for (TensorView* gate : {&a.beta, &a.g, &a.A_log, &a.dt_bias}) visit(*gate, Kind::input);
  } else {
    for (TensorView* gate : {&a.i, &a.f}) visit(*gate, Kind::input);
  }
}

template <class State, class Visit>
void visit_state(State& state, Kind kind, const Visit& visit) {
  visit(state.C, kind);
  visit(state.n, kind);
  if constexpr (requires { state.m; }) visit(state.m, kind);
}

template <class Visit>
void visit_views(MlstmForward& a, const Visit& visit) {
  visit_inputs(a, visit);
  visit(a.h, Kind::output);
  visit_state(a.initial_state, Kind::input, visit);
  visit_state(a.last_state, Kind::output, visit);
  visit(a.cu_seqlens, Kind::index);
}

template <class Visit>
void visit_views(MlstmBackward& a, const Visit& visit) {
  visit_inputs(a, visit);
  visit(a.dh, Kind::input);
  visit(a.dq, Kind::output);
  visit(a.dk, Kind::output);
  visit(a.dv, Kind::output);
  visit(a.di, Kind::output);
  visit(a.df, Kind::output);
  visit_state(a.initial_state, Kind::input, visit);
  visit_state(a.dlast_state, Kind::input, visit);
  visit_state(a.dinitial_state, Kind::output, visit);
  visit(a.cu_seqlens, Kind::index);
}

template <class Visit>
void visit_views(MlstmStep& a, const Visit& visit) {
  visit_inputs(a, visit);
  visit(a.h, Kind::output);
  visit_state(a.state, Kind::output, visit);
  visit(a.slots, Kind::index);
}

template <class Visit>
void visit_views(DeltaForward& a, const Visit& visit) {
  visit_inputs(a, visit);
  visit(a.h, Kind::output);
  visit(a.initial_state, Kind::input);
  visit(a.last_state, Kind::output);
  visit(a.cu_seqlens, Kind::index);
}

template <class Visit>
void visit_views(DeltaBackward& a, const Visit& visit) {
  visit_inputs(a, visit);
  for (TensorView* input : {&a.dh, &a.initial_state, &a.dlast_state}) visit(*input, Kind::input);
  for (MutableTensorView* output : {&a.dq, &a.dk, &a.dv, &a.dbeta, &a.dg, &a.dA_log, &a.ddt_bias, &a.dinitial_state})
    visit(*output, Kind::output);
  visit(a.cu_seqlens, Kind::index);
}

template <class Visit>
void visit_views(DeltaStep& a, const Visit& visit) {
  visit_inputs(a, visit);
  visit(a.h, Kind::output);
  visit(a.state, Kind::output);
  visit(a.slots, Kind::index);
}

// What all three operations of the state space dual read.
template <class Args, class Visit>
void visit_ssd_inputs(Args& a, const Visit& visit) {
  for (TensorView* input : {&a.x, &a.dt, &a.A, &a.B, &a.C, &a.D, &a.z, &a.dt_bias}) visit(*input, Kind::input);
}

template <class Visit>
void visit_views(SsdForward& a, const Visit& visit) {
  visit_ssd_inputs(a, visit);
  visit(a.initial_state, Kind::input);
  for (MutableTensorView* output : {&a.y, &a.ungated, &a.last_state}) visit(*output, Kind::output);
  visit(a.cu_seqlens, Kind::index);
  visit(a.seq_idx, Kind::input);
}

template <class Visit>
void visit_views(SsdBackward& a, const Visit& visit) {
  visit_ssd_inputs(a, visit);
  for (TensorView* input : {&a.ungated, &a.dy, &a.initial_state, &a.dlast_state}) visit(*input, Kind::input);
  for (MutableTensorView* output : {&a.dx, &a.ddt, &a.dA, &a.dB, &a.dC, &a.dD, &a.dz, &a.ddt_bias, &a.dinitial_state})
    visit(*output, Kind::output);
  visit(a.cu_seqlens, Kind::index);
  visit(a.seq_idx, Kind::input);
}

template <class Visit>
void visit_views(SsdStep& a, const Visit& visit) {
  visit_ssd_inputs(a, visit);
  visit(a.y, Kind::output);
  visit(a.state, Kind::output);
  visit(a.slots, Kind::index);
}

// ---------------------------------------------------------------- valid arguments

class Builder {
 public:
  explicit Builder(Bytes& bytes) : bytes_(bytes) {
    constexpr DType floats[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};
    B_ = 1 + bytes.below(3);
    T_ = bytes.below(6);
    Hqk_ = 1 + bytes.below(2);
    H_ = Hqk_ * (1 + bytes.below(2));
    dqk_ = 1 + bytes.below(5);
    dhv_ = 1 + bytes.below(5);
    dtype_ = floats[bytes.below(4)];
    gate_dtype_ = floats[bytes.below(4)];
    state_dtype_ = dtype_ == DType::float64 ? DType::float64 : DType::float32;
  }

  MlstmForward forward() {
    MlstmForward a;
    inputs(a);
    a.h = tokens(dtype_, H_, dhv_);
    pack(a.cu_seqlens);
    if (bytes_.chance(2)) a.initial_state = {matrix(N_), vector(N_), scalar(N_)};
    if (bytes_.chance(2)) a.last_state = {matrix(N_), vector(N_), scalar(N_)};
    if (bytes_.chance(8)) a.initial_state = {a.last_state.C, a.last_state.n, a.last_state.m};
    options(a.options);
    return a;
  }

  MlstmBackward backward() {
    MlstmBackward a;
    inputs(a);
    a.dh = tokens(dtype_, H_, dhv_);
    a.dq = tokens(dtype_, Hqk_, dqk_);
    a.dk = tokens(dtype_, Hqk_, dqk_);
    a.dv = tokens(dtype_, H_, dhv_);
    a.di = gates();
    a.df = gates();
    pack(a.cu_seqlens);
    if (bytes_.chance(2)) a.initial_state = {matrix(N_), vector(N_), scalar(N_)};
    if (bytes_.chance(2)) a.dlast_state.C = matrix(N_);
    if (bytes_.chance(2)) a.dlast_state.n = vector(N_);
    if (bytes_.chance(2)) a.dinitial_state.C = matrix(N_);
    if (bytes_.chance(2)) a.dinitial_state.n = vector(N_);
    options(a.options);
    return a;
  }

  MlstmStep step() {
    MlstmStep a;
    inputs(a);
    a.h = tokens(dtype_, H_, dhv_);
    const std::int64_t states = pool(a.slots);
    a.state = {matrix(states), vector(states), scalar(states)};
    options(a.options);
    return a;
  }

  DeltaForward delta_forward() {
    DeltaForward a;
    inputs(a);
    a.h = tokens(dtype_, H_, dhv_);
    pack(a.cu_seqlens);
    if (bytes_.chance(2)) a.initial_state = matrix(N_);
    if (bytes_.chance(2)) a.last_state = matrix(N_);
    if (bytes_.chance(8)) a.initial_state = a.last_state;
    options(a.options);
    return a;
  }

  DeltaBackward delta_backward() {
    DeltaBackward a;
    inputs(a);
    a.dh = tokens(dtype_, H_, dhv_);
    a.dq = tokens(dtype_, Hqk_, dqk_);
    a.dk = tokens(dtype_, Hqk_, dqk_);
    a.dv = tokens(dtype_, H_, dhv_);
    a.dbeta = gates();
    if (a.g.given()) a.dg = gates();
    if (a.A_log.given()) a.dA_log = dense(gate_dtype_, {H_});
    if (a.dt_bias.given()) a.ddt_bias = dense(gate_dtype_, {H_});
    pack(a.cu_seqlens);
    if (bytes_.chance(2)) a.initial_state = matrix(N_);
    if (bytes_.chance(2)) a.dlast_state = matrix(N_);
    if (bytes_.chance(2)) a.dinitial_state = matrix(N_);
    options(a.options);
    return a;
  }

  SsdForward ssd_forward() {
    SsdForward a;
    ssd_inputs(a);
    a.y = tokens(dtype_, H_, dhv_);
    if (a.z.given() && bytes_.chance(2)) a.ungated = tokens(dtype_, H_, dhv_);
    pack(a.cu_seqlens);
    number(a.seq_idx);
    if (bytes_.chance(2)) a.initial_state = turned_matrix();
    if (bytes_.chance(2)) a.last_state = turned_matrix();
    if (bytes_.chance(8)) a.initial_state = a.last_state;
    options(a.options);
    return a;
  }

  SsdBackward ssd_backward() {
    SsdBackward a;
    ssd_inputs(a);
    if (a.z.given()) a.ungated = tokens(dtype_, H_, dhv_);
    if (a.z.given()) a.dz = tokens(dtype_, H_, dhv_);
    a.dy = tokens(dtype_, H_, dhv_);
    a.dx = tokens(dtype_, H_, dhv_);
    a.ddt = gates();
    a.dA = dense(gate_dtype_, {H_});
    a.dB = tokens(dtype_, Hqk_, dqk_);
    a.dC = tokens(dtype_, Hqk_, dqk_);
    if (a.D.rank == 1) a.dD = dense(gate_dtype_, {H_});
    if (a.D.rank == 2) a.dD = dense(gate_dtype_, {H_, dhv_});
    if (a.dt_bias.given()) a.ddt_bias = dense(gate_dtype_, {H_});
    pack(a.cu_seqlens);
    number(a.seq_idx);
    if (bytes_.chance(2)) a.initial_state = turned_matrix();
    if (bytes_.chance(2)) a.dlast_state = turned_matrix();
    if (bytes_.chance(2)) a.dinitial_state = turned_matrix();
    options(a.options);
    return a;
  }

  SsdStep ssd_step() {
    SsdStep a;
    ssd_inputs(a);
    a.y = tokens(dtype_, H_, dhv_);
    constexpr DType narrow[] = {DType::float32, DType::bfloat16, DType::float16};
    const std::int64_t states = pool(a.slots);
    a.state = dense(dtype_ == DType::float64 ? dtype_ : narrow[bytes_.below(3)], {states, H_, dhv_, dqk_});
    options(a.options);
    return a;
  }

  DeltaStep delta_step() {
    DeltaStep a;
    inputs(a);
    a.h = tokens(dtype_, H_, dhv_);
    a.state = matrix(pool(a.slots));
    options(a.options);
    return a;
  }

 private:
  MutableTensorView dense(DType dtype, std::initializer_list<std::int64_t> shape) {
    MutableTensorView view(nullptr, dtype, shape);
    std::int64_t bytes = item_size(dtype);
    for (const std::int64_t extent : shape) bytes *= extent;
    view.data = arena.data() + used_;
    used_ += static_cast<std::size_t>((bytes + 15) / 8 * 8);
    if (used_ > arena_size) throw FuzzFailure("the arena is too small for the largest valid call");
    return view;
  }

  MutableTensorView tokens(DType dtype, std::int64_t heads, std::int64_t width) {
    if (bytes_.chance(3)) return dense(dtype, {B_, heads, T_, width}).transposed(1, 2);
    return dense(dtype, {B_, T_, heads, width});
  }
  MutableTensorView gates() {
    if (bytes_.chance(3)) return dense(gate_dtype_, {B_, H_, T_}).transposed(1, 2);
    return dense(gate_dtype_, {B_, T_, H_});
  }
  MutableTensorView matrix(std::int64_t states) { return dense(state_dtype_, {states, H_, dqk_, dhv_}); }
  MutableTensorView vector(std::int64_t states) { return dense(state_dtype_, {states, H_, dqk_}); }
  MutableTensorView scalar(std::int64_t states) { return dense(state_dtype_, {states, H_}); }

  template <class Args>
  void inputs(Args& a) {
    if (bytes_.chance(3)) B_ = 1;
    a.q = tokens(dtype_, Hqk_, dqk_);
    a.k = tokens(dtype_, Hqk_, dqk_);
    a.v = tokens(dtype_, H_, dhv_);
    if constexpr (requires { a.beta; }) {
      a.beta = gates();
      if (bytes_.chance(2)) a.g = gates();
      if (a.g.given() && bytes_.chance(2)) a.A_log = dense(gate_dtype_, {H_});
      if (a.A_log.given() && bytes_.chance(2)) a.dt_bias = dense(gate_dtype_, {H_});
    } else {
      a.i = gates();
      a.f = gates();
    }
    N_ = B_;
  }

  template <class Args>
  void ssd_inputs(Args& a) {
    if (bytes_.chance(3)) B_ = 1;
    a.x = tokens(dtype_, H_, dhv_);
    a.dt = gates();
    a.A = dense(gate_dtype_, {H_});
    a.B = tokens(dtype_, Hqk_, dqk_);
    a.C = tokens(dtype_, Hqk_, dqk_);
    if (bytes_.chance(2)) a.z = tokens(dtype_, H_, dhv_);
    if (bytes_.chance(3)) a.D = dense(gate_dtype_, {H_});
    if (!a.D.given() && bytes_.chance(3)) a.D = dense(gate_dtype_, {H_, dhv_});
    if (bytes_.chance(2)) a.dt_bias = dense(gate_dtype_, {H_});
    N_ = B_;
  }

  // A state of the state space dual, contiguous or with its last axes exchanged in memory.
  MutableTensorView turned_matrix() {
    if (bytes_.chance(2)) return dense(state_dtype_, {N_, H_, dhv_, dqk_});
    return matrix(N_).transposed(2, 3);
  }

  // Whatever the memory holds: any number will do.
  void number(TensorView& seq_idx) {
    if (bytes_.chance(3)) seq_idx = dense(bytes_.chance(2) ? DType::int32 : DType::int64, {B_, T_});
  }

  // How many states a step has, and which of them it works on where there are more than rows.
  std::int64_t pool(TensorView& slots) {
    if (!bytes_.chance(2)) return B_;
    const std::int64_t states = B_ + bytes_.below(3);
    const MutableTensorView view = dense(DType::int32, {B_});
    for (std::int32_t b = 0; b < B_; ++b) {
      const auto slot = static_cast<std::int32_t>(states) - 1 - b;
      std::memcpy(static_cast<std::byte*>(view.data) + 4 * b, &slot, 4);
    }
    slots = view;
    return states;
  }

  // Sequences of random lengths, when the batch allows.
  void pack(TensorView& cu_seqlens) {
    if (B_ != 1 || !bytes_.chance(2)) return;
    N_ = 1 + bytes_.below(4);
    const MutableTensorView view = dense(DType::int64, {N_ + 1});
    std::vector<std::int64_t> boundaries{0, T_ - (bytes_.chance(4) ? bytes_.below(T_ + 1) : 0)};
    for (std::int64_t s = 1; s < N_; ++s) boundaries.push_back(bytes_.below(boundaries[1] + 1));
    std::sort(boundaries.begin(), boundaries.end());
    std::memcpy(view.data, boundaries.data(), boundaries.size() * 8);
    cu_seqlens = view;
  }

  void options(MlstmOptions& o) {
    o.gate = static_cast<InputGate>(bytes_.below(3));
    o.normalizer = static_cast<Normalizer>(bytes_.below(3));
    o.exact_normalizer_grad = bytes_.chance(2);
    o.chunk_size = bytes_.below(8);
    o.formulation = static_cast<Formulation>(bytes_.below(2));
    if (bytes_.chance(4)) o.soft_cap = 15;
    if (bytes_.chance(4)) o.qk_scale = 0.5;
  }

  void options(DeltaOptions& o) {
    o.write = static_cast<WriteGate>(bytes_.below(3));
    o.normalize_qk = bytes_.chance(2);
    o.chunk_size = bytes_.below(8);
    if (bytes_.chance(4)) o.qk_scale = 0.5;
  }

  void options(SsdOptions& o) {
    o.dt_softplus = bytes_.chance(2);
    if (bytes_.chance(3)) o.dt_min = 0.5;
    if (bytes_.chance(3)) o.dt_max = 2;
    o.chunk_size = bytes_.below(8);
  }

  Bytes& bytes_;
  std::size_t used_ = 0;
  std::int64_t B_, T_, Hqk_, H_, dqk_, dhv_, N_ = 1;
  DType dtype_, gate_dtype_, state_dtype_;
};

// ---------------------------------------------------------------- spoiling them

std::int64_t interesting(Bytes& bytes, std::int64_t now) {
  constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::int64_t values[] = {
      0,         1,        2,         3,         -1,        -2,          now == most ? now : now + 1, least, most,
      least + 1, most / 2, 1LL << 31, 1LL << 32, 1LL << 40, -(1LL << 40)};
  const std::int64_t choice = bytes.below(std::size(values) + 2);
  if (choice < std::ssize(values)) return values[choice];
  return choice == std::ssize(values) ? bytes.below(256) : bytes.wide();
}

template <class Data>
void spoil(BasicTensorView<Data>& view, Bytes& bytes) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  const auto axis = static_cast<std::size_t>(bytes.below(BasicTensorView<Data>::max_rank));
  switch (bytes.below(8)) {
    case 0: view.shape.at(axis) = interesting(bytes, view.shape.at(axis)); break;
    case 1: view.strides.at(axis) = interesting(bytes, view.strides.at(axis)); break;
    case 2: view.dtype = static_cast<DType>(bytes.below(8)); break;
    case 3: view.rank = static_cast<int>(bytes.below(8)) - 1; break;
    case 4: view.data = static_cast<Byte*>(arena.data() + bytes.below(256) * bytes.below(128)); break;
    case 5:
      view.data = reinterpret_cast<Byte*>(bytes.wide());  // NOLINT(performance-no-int-to-ptr): wild on purpose
      break;
    case 6: view.data = nullptr; break;
    default: view = {}; break;
  }
}

constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
constexpr double numbers[] = {0, -1, nan, infinity, -infinity, 1e300, 1e-300};

void spoil(DeltaOptions& o, Bytes& bytes) {
  switch (bytes.below(3)) {
    case 0: o.chunk_size = interesting(bytes, o.chunk_size); break;
    case 1: o.qk_scale = numbers[bytes.below(7)]; break;
    default: o.write = static_cast<WriteGate>(bytes.below(5)); break;
  }
}

void spoil(SsdOptions& o, Bytes& bytes) {
  switch (bytes.below(3)) {
    case 0: o.chunk_size = interesting(bytes, o.chunk_size); break;
    case 1: o.dt_min = numbers[bytes.below(7)]; break;
    default: o.dt_max = numbers[bytes.below(7)]; break;
  }
}

void spoil(MlstmOptions& o, Bytes& bytes) {
  switch (bytes.below(7)) {
    case 0: o.chunk_size = interesting(bytes, o.chunk_size); break;
    case 1: o.eps = numbers[bytes.below(7)]; break;
    case 2: o.qk_scale = numbers[bytes.below(7)]; break;
    case 3: o.soft_cap = numbers[bytes.below(7)]; break;
    case 4: o.gate = static_cast<InputGate>(bytes.below(4)); break;
    case 5: o.normalizer = static_cast<Normalizer>(bytes.below(5)); break;
    default: o.formulation = static_cast<Formulation>(bytes.below(5)); break;
  }
}

// ---------------------------------------------------------------- where a view may reach

// Within the arena, whatever the numbers are; empty views reach nothing. In double: exact for all that could lie
// inside, and what is rounded is far outside.
bool inside_arena(const TensorView& view) {
  if (!view.given()) return true;
  if (view.rank < 0 || view.rank > TensorView::max_rank) return false;
  const auto item = static_cast<double>(item_size(view.dtype));
  double low = 0, high = item;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape.at(axis) <= 0) return true;
    const double steps = static_cast<double>(view.shape.at(axis)) - 1;
    const double reach = steps * static_cast<double>(view.strides.at(axis)) * item;
    (reach < 0 ? low : high) += reach;
  }
  const double begin = static_cast<double>(reinterpret_cast<std::uintptr_t>(view.data)) -
                       static_cast<double>(reinterpret_cast<std::uintptr_t>(arena.data()));
  return begin + low >= 0 && begin + high <= static_cast<double>(arena_size);
}

void mark(const TensorView& view, std::vector<bool>& marks) {
  std::int64_t count = view.given() ? 1 : 0;
  for (int axis = 0; axis < view.rank; ++axis) count *= view.shape.at(static_cast<std::size_t>(axis));
  for (std::int64_t index = 0; index < count; ++index) {
    std::int64_t rest = index, offset = 0;
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      const auto a = static_cast<std::size_t>(axis);
      offset += rest % view.shape.at(a) * view.strides.at(a);
      rest /= view.shape.at(a);
    }
    const auto first = static_cast<const std::byte*>(view.data) - arena.data() + offset * item_size(view.dtype);
    for (std::int64_t byte = 0; byte < item_size(view.dtype); ++byte)
      marks[static_cast<std::size_t>(first + byte)] = true;
  }
}

// ---------------------------------------------------------------- the call

void execute(const MlstmForward& a, const Execution& e) { forward(a, e); }
void execute(const MlstmBackward& a, const Execution& e) { backward(a, e); }
void execute(const MlstmStep& a, const Execution& e) { step(a, e); }
void execute(const MlstmForward& a, const Plan& p, std::span<std::byte> scratch) { forward(a, p, scratch); }
void execute(const MlstmBackward& a, const Plan& p, std::span<std::byte> scratch) { backward(a, p, scratch); }
void execute(const MlstmStep& a, const Plan& p, std::span<std::byte> scratch) { step(a, p, scratch); }

void execute(const DeltaForward& a, const Execution& e) { delta_forward(a, e); }
void execute(const DeltaBackward& a, const Execution& e) { delta_backward(a, e); }
void execute(const DeltaStep& a, const Execution& e) { delta_step(a, e); }
void execute(const DeltaForward& a, const DeltaPlan& p, std::span<std::byte> scratch) { delta_forward(a, p, scratch); }
void execute(const DeltaBackward& a, const DeltaPlan& p, std::span<std::byte> scratch) {
  delta_backward(a, p, scratch);
}
void execute(const DeltaStep& a, const DeltaPlan& p, std::span<std::byte> scratch) { delta_step(a, p, scratch); }

void execute(const SsdForward& a, const Execution& e) { ssd_forward(a, e); }
void execute(const SsdBackward& a, const Execution& e) { ssd_backward(a, e); }
void execute(const SsdStep& a, const Execution& e) { ssd_step(a, e); }
void execute(const SsdForward& a, const SsdPlan& p, std::span<std::byte> scratch) { ssd_forward(a, p, scratch); }
void execute(const SsdBackward& a, const SsdPlan& p, std::span<std::byte> scratch) { ssd_backward(a, p, scratch); }
void execute(const SsdStep& a, const SsdPlan& p, std::span<std::byte> scratch) { ssd_step(a, p, scratch); }

template <class Args>
auto plan_of(const Args& args, const Execution& execution) {
  if constexpr (requires { args.beta; })
    return delta_plan(args, execution);
  else if constexpr (requires { args.dt; })
    return ssd_plan(args, execution);
  else
    return plan(args, execution);
}

template <class Chosen>
const auto& planned_shape(const Chosen& chosen) {
  if constexpr (requires { chosen.scan; })
    return chosen.scan.shape;
  else
    return chosen.shape;
}

// True if the call was refused; anything but a refusal or a return is a failure.
template <class Call>
bool refuses(const Call& call) {
  try {
    call();
    return false;
  } catch (const InvalidArgument&) {
    return true;
  } catch (const std::exception& error) {
    throw FuzzFailure(std::string("threw neither InvalidArgument nor nothing: ") + error.what());
  }
}

void fill_arena(std::uint64_t seed) {
  // Numbers between -8 and 8 in every float dtype's eyes: the exponent bits of each 16-bit half stay near the middle.
  for (std::size_t at = 0; at < arena_size; at += 2) {
    const auto bits = static_cast<std::uint16_t>(reference::mix(seed + at));
    const auto half = static_cast<std::uint16_t>((bits & 0x81FF) | 0x3C00);
    std::memcpy(arena.data() + at, &half, 2);
  }
}

template <class Args>
Outcome run(Args args, Bytes& bytes) {
  int views = 0;
  visit_views(args, [&](auto&, Kind) { ++views; });
  for (std::int64_t left = bytes.below(4); left > 0; --left) {
    const std::int64_t target = bytes.below(views + 2);
    int view = 0;
    visit_views(args, [&](auto& candidate, Kind) {
      if (view++ == target) spoil(candidate, bytes);
    });
    if (target == views) spoil(args.options, bytes);
    if (target > views) arena[static_cast<std::size_t>(bytes.wide() & (arena_size - 1))] ^= std::byte{0x11};
  }
  // Validation reads the integers of index vectors, so those must be readable, and not so many that it takes for ever.
  visit_views(args, [&](auto& view, Kind kind) {
    if (kind == Kind::index && view.data != nullptr && (!inside_arena(view) || view.shape[0] > 4096)) view = {};
  });
  const Execution execution{.threads = static_cast<int>(bytes.below(4))};

  const std::vector<std::byte> before(arena.begin(), arena.end());
  decltype(plan_of(args, execution)) chosen;
  if (refuses([&] { chosen = plan_of(args, execution); })) {
    if (!refuses([&] { execute(args, execution); })) throw FuzzFailure("the plan was refused and the call was not");
    if (!std::equal(before.begin(), before.end(), arena.begin())) throw FuzzFailure("a refused call wrote something");
    return Outcome::refused;
  }
  bool inside = true;
  std::vector<bool> written(arena_size);
  visit_views(args, [&](auto& view, Kind) { inside = inside && inside_arena(view); });
  const auto& shape = planned_shape(chosen);
  const double rows = static_cast<double>(shape.batch) * static_cast<double>(shape.heads);
  if (!inside || chosen.scratch_bytes > (1U << 26) || rows > 1e5) return Outcome::planned;
  visit_views(args, [&](auto& view, Kind kind) {
    if (kind == Kind::output) mark(view, written);
  });

  const testkit::Buffer scratch(static_cast<std::int64_t>(chosen.scratch_bytes));
  const bool own_scratch = bytes.chance(2);
  const bool refused = refuses([&] {
    own_scratch ? execute(args, chosen, std::span(scratch.data(), chosen.scratch_bytes)) : execute(args, execution);
  });
  if (refused) throw FuzzFailure("the plan was accepted and the call was not");
  if (!scratch.margins_intact()) throw FuzzFailure("the call wrote outside its scratch");
  for (std::size_t at = 0; at < arena_size; ++at) {
    if (!written[at] && arena[at] != before[at]) throw FuzzFailure("the call wrote outside its outputs");
  }
  return Outcome::ran;
}

}  // namespace

Outcome fuzz_call(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  fill_arena(bytes.next());
  const std::int64_t operation = bytes.below(9);
  Builder builder(bytes);
  switch (operation) {
    case 0: return run(builder.forward(), bytes);
    case 1: return run(builder.backward(), bytes);
    case 2: return run(builder.step(), bytes);
    case 3: return run(builder.delta_forward(), bytes);
    case 4: return run(builder.delta_backward(), bytes);
    case 5: return run(builder.delta_step(), bytes);
    case 6: return run(builder.ssd_forward(), bytes);
    case 7: return run(builder.ssd_backward(), bytes);
    default: return run(builder.ssd_step(), bytes);
  }
}

}  // namespace tfla::test
