#include "reference/harness.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <tuple>
#include <utility>

#include "reference/reference.h"
#include "reference/regimes.h"
#include "reference/tensor.h"
#include "reference/values.h"

namespace tfla::reference {
namespace {

constexpr std::int64_t no_index = -1;

// [B,T,heads,width], in memory as the layout says.
Tensor token_tensor(Layout layout, DType dtype, std::int64_t B, std::int64_t T, std::int64_t heads,
                    std::int64_t width) {
  if (layout != Layout::bhtd) return {dtype, {B, T, heads, width}};
  Tensor tensor(dtype, {B, heads, T, width});
  tensor.view = tensor.view.transposed(1, 2);
  return tensor;
}

Tensor gate_tensor(Layout layout, DType dtype, std::int64_t B, std::int64_t T, std::int64_t heads) {
  if (layout != Layout::bhtd) return {dtype, {B, T, heads}};
  Tensor tensor(dtype, {B, heads, T});
  tensor.view = tensor.view.transposed(1, 2);
  return tensor;
}

// Slice [.., begin : begin + heads * width] of the rows of a projection [B,T,row], seen as [B,T,heads,width].
Tensor projection_slice(const Tensor& projection, std::int64_t begin, std::int64_t heads, std::int64_t width) {
  const MutableTensorView& all = projection.view;
  const std::int64_t B = all.shape[0], T = all.shape[1], row = all.shape[2];
  std::byte* data = projection.buffer->data() + begin * item_size(all.dtype);
  return {projection.buffer, MutableTensorView(data, all.dtype, {B, T, heads, width}, {T * row, row, width, 1})};
}

Tensor gate_slice(const Tensor& projection, std::int64_t begin, std::int64_t heads) {
  const MutableTensorView& all = projection.view;
  const std::int64_t B = all.shape[0], T = all.shape[1], row = all.shape[2];
  std::byte* data = projection.buffer->data() + begin * item_size(all.dtype);
  return {projection.buffer, MutableTensorView(data, all.dtype, {B, T, heads}, {T * row, row, 1})};
}

// Calls value(logical index) for every element, in parallel: a number depends on its index alone.
void fill(const Tensor& tensor, const std::function<double(std::int64_t)>& value) {
  const std::int64_t count = element_count(tensor.view);
#pragma omp parallel for schedule(static)
  for (std::int64_t index = 0; index < count; ++index) {
    store(tensor.view.data, tensor.view.dtype, offset_of(tensor.view, index), value(index));
  }
}

// The rows [begin, begin + count) of one head of a [B,T,heads,width] or [B,T,heads] tensor, dense.
std::vector<double> rows(const TensorView& view, std::int64_t batch, std::int64_t begin, std::int64_t count,
                         std::int64_t head) {
  const std::int64_t width = view.rank == 4 ? view.shape[3] : 1;
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(count * width));
  for (std::int64_t t = begin; t < begin + count; ++t) {
    const std::int64_t start = batch * view.strides[0] + t * view.strides[1] + head * view.strides[2];
    for (std::int64_t c = 0; c < width; ++c) values.push_back(load(view.data, view.dtype, start + c));
  }
  return values;
}

// Entry (sequence, head) of a dense [N,H,...] tensor.
std::vector<double> entry(const TensorView& view, std::int64_t index) {
  if (!view.given()) return {};
  const std::int64_t size = element_count(view) / (view.shape[0] * view.shape[1]);
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(size));
  for (std::int64_t c = 0; c < size; ++c) values.push_back(load(view.data, view.dtype, index * size + c));
  return values;
}

}  // namespace

struct Problem::Storage {
  Case description;
  std::vector<std::int64_t> cu_seqlens;
  Tensor q, k, v, i, f, dh;
  Tensor h, dq, dk, dv, di, df;
  Tensor C0, n0, m0, C, n, m;
  Tensor dC_last, dn_last, dC0, dn0;
  Tensor packing;  // cu_seqlens where the call can read it
  Tensor saved;    // what forward keeps for backward
  MlstmForward forward;
  MlstmBackward backward;

  explicit Storage(const Case& given) : description(given), cu_seqlens(given.cu_seqlens) {
    derive_sequences();
    allocate_tokens();
    allocate_states();
    draw();
    fill_arguments();
  }

  [[nodiscard]] std::vector<std::pair<const char*, const Tensor*>> forward_outputs() const {
    return {{"h", &h}, {"C", &C}, {"n", &n}, {"m", &m}};
  }
  [[nodiscard]] std::vector<std::pair<const char*, const Tensor*>> backward_outputs() const {
    return {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"di", &di}, {"df", &df}, {"dC0", &dC0}, {"dn0", &dn0}};
  }

  // First token, number of tokens and batch row of a sequence.
  struct Range {
    std::int64_t batch, begin, count;
  };
  [[nodiscard]] Range range(std::int64_t sequence) const {
    if (cu_seqlens.empty()) return {sequence, 0, description.shape.tokens};
    const auto s = static_cast<std::size_t>(sequence);
    return {0, cu_seqlens[s], cu_seqlens[s + 1] - cu_seqlens[s]};
  }

  [[nodiscard]] Head head_inputs(std::int64_t sequence, std::int64_t head, bool with_backward) const {
    const MlstmShape& shape = description.shape;
    const auto [batch, begin, count] = range(sequence);
    const std::int64_t qk_head = head / (shape.heads / shape.qk_heads), state = sequence * shape.heads + head;
    Head inputs;
    inputs.tokens = count;
    inputs.dqk = shape.dqk;
    inputs.dhv = shape.dhv;
    inputs.q = rows(q.view, batch, begin, count, qk_head);
    inputs.k = rows(k.view, batch, begin, count, qk_head);
    inputs.v = rows(v.view, batch, begin, count, head);
    inputs.i = rows(i.view, batch, begin, count, head);
    inputs.f = rows(f.view, batch, begin, count, head);
    inputs.C0 = entry(C0.view, state);
    inputs.n0 = entry(n0.view, state);
    if (m0.given()) inputs.m0 = entry(m0.view, state).front();
    if (with_backward) {
      inputs.dh = rows(dh.view, batch, begin, count, head);
      inputs.dC_last = entry(dC_last.view, state);
      inputs.dn_last = entry(dn_last.view, state);
    }
    return inputs;
  }

  // In place: the initial state where forward looks for it and leaves the last one. Backward has it elsewhere.
  void start_last_state() const {
    if (!description.in_place) return;
    for (const auto& [from, to] : {std::pair(&C0, &C), std::pair(&n0, &n), std::pair(&m0, &m)})
      scatter(to->view, gather(from->view));
  }

 private:
  void derive_sequences() {
    MlstmShape& shape = description.shape;
    shape.packed = !cu_seqlens.empty();
    shape.sequences = shape.packed ? static_cast<std::int64_t>(cu_seqlens.size()) - 1 : shape.batch;
    shape.longest = 0;
    for (std::int64_t s = 0; s < shape.sequences; ++s) shape.longest = std::max(shape.longest, range(s).count);
  }

  void allocate_tokens() {
    const MlstmShape& s = description.shape;
    const Layout layout = description.layout;
    h = token_tensor(layout, s.dtype, s.batch, s.tokens, s.heads, s.dhv);
    dh = token_tensor(layout, s.dtype, s.batch, s.tokens, s.heads, s.dhv);
    if (layout == Layout::fused) {
      const std::int64_t row = 2 * s.qk_heads * s.dqk + s.heads * s.dhv;
      const Tensor qkv(s.dtype, {s.batch, s.tokens, row}), dqkv(s.dtype, {s.batch, s.tokens, row});
      for (auto [all, first, second, third] : {std::tuple(&qkv, &q, &k, &v), std::tuple(&dqkv, &dq, &dk, &dv)}) {
        *first = projection_slice(*all, 0, s.qk_heads, s.dqk);
        *second = projection_slice(*all, s.qk_heads * s.dqk, s.qk_heads, s.dqk);
        *third = projection_slice(*all, 2 * s.qk_heads * s.dqk, s.heads, s.dhv);
      }
      const Tensor gates(s.gate_dtype, {s.batch, s.tokens, 2 * s.heads});
      const Tensor dgates(s.gate_dtype, {s.batch, s.tokens, 2 * s.heads});
      i = gate_slice(gates, 0, s.heads);
      f = gate_slice(gates, s.heads, s.heads);
      di = gate_slice(dgates, 0, s.heads);
      df = gate_slice(dgates, s.heads, s.heads);
      return;
    }
    for (Tensor* tensor : {&q, &k, &dq, &dk}) {
      *tensor = token_tensor(layout, s.dtype, s.batch, s.tokens, s.qk_heads, s.dqk);
    }
    for (Tensor* tensor : {&v, &dv}) *tensor = token_tensor(layout, s.dtype, s.batch, s.tokens, s.heads, s.dhv);
    for (Tensor* tensor : {&i, &f, &di, &df}) {
      *tensor = gate_tensor(layout, s.gate_dtype, s.batch, s.tokens, s.heads);
    }
  }

  void allocate_states() {
    const MlstmShape& s = description.shape;
    const std::int64_t N = s.sequences;
    const DType dtype = s.dtype == DType::float64 ? DType::float64 : DType::float32;
    const auto matrix = [&] { return Tensor(dtype, {N, s.heads, s.dqk, s.dhv}); };
    const auto vector = [&] { return Tensor(dtype, {N, s.heads, s.dqk}); };
    const auto scalar = [&] { return Tensor(dtype, {N, s.heads}); };
    if (N > 0) {
      C = matrix();
      n = vector();
      m = scalar();
    }
    if (description.initial_state) {
      C0 = matrix();
      n0 = vector();
      m0 = scalar();
      dC0 = matrix();
      dn0 = vector();
    }
    if (description.last_state_grad) {
      dC_last = matrix();
      dn_last = vector();
    }
  }

  void draw() {
    const MlstmShape& s = description.shape;
    const std::uint64_t seed = description.seed;
    const Regime regime = description.regime;
    const double scale = s.dtype == DType::float16 ? float16_scale(regime) : 1;
    const auto normals = [&](const Tensor& tensor, Stream stream, double factor) {
      fill(tensor, [=](std::int64_t index) { return factor * normal(seed, stream, index); });
    };
    normals(q, Stream::q, 1);
    normals(k, Stream::k, 1);
    normals(v, Stream::v, scale);
    normals(dh, Stream::dh, scale);
    normals(C0, Stream::C0, 1);
    normals(n0, Stream::n0, 1);
    normals(m0, Stream::m0, 1);
    normals(dC_last, Stream::dC_last, 1);
    normals(dn_last, Stream::dn_last, 1);
    // In log space: the decays of the regime, and input weights up to 2.
    const bool log_space = description.options.gate == InputGate::log;
    fill(i, [=](std::int64_t index) {
      const double raw = input_gate(regime, normal(seed, Stream::i, index));
      return log_space ? log_sigmoid(raw) + std::numbers::ln2 : raw;
    });
    fill(f, [=](std::int64_t index) {
      const std::int64_t token = index / s.heads % s.tokens, head = index % s.heads;
      const double raw = forget_gate(regime, normal(seed, Stream::f, index), token, head, s.heads);
      return log_space ? log_sigmoid(raw) : raw;
    });
  }

  void fill_arguments() {
    TensorView boundaries;
    if (!cu_seqlens.empty()) {
      const std::int64_t count = std::ssize(cu_seqlens), stride = description.index_stride;
      packing = Tensor(DType::int64, {count * stride});
      auto* numbers = static_cast<std::int64_t*>(packing.view.data);
      std::fill_n(numbers, count * stride, 1);
      for (std::int64_t s = 0; s < count; ++s) numbers[s * stride] = cu_seqlens[static_cast<std::size_t>(s)];
      boundaries = TensorView(numbers, DType::int64, {count}, {stride});
    }
    const MlstmState initial{C0.view, n0.view, m0.view};
    start_last_state();
    forward = {.q = q.view,
               .k = k.view,
               .v = v.view,
               .i = i.view,
               .f = f.view,
               .h = h.view,
               .initial_state = description.in_place ? MlstmState{C.view, n.view, m.view} : initial,
               .last_state = {C.view, n.view, m.view},
               .cu_seqlens = boundaries,
               .options = description.options};
    backward = {.q = q.view,
                .k = k.view,
                .v = v.view,
                .i = i.view,
                .f = f.view,
                .dh = dh.view,
                .dq = dq.view,
                .dk = dk.view,
                .dv = dv.view,
                .di = di.view,
                .df = df.view,
                .initial_state = initial,
                .dlast_state = {dC_last.view, dn_last.view},
                .dinitial_state = {dC0.view, dn0.view},
                .cu_seqlens = boundaries,
                .options = description.options};
    if (description.options.keep == Keep::nothing) return;
    const std::size_t bytes = plan(forward, {.device = description.device}).saved_bytes;
    if (bytes == 0) return;
    saved = Tensor(DType::float32, {static_cast<std::int64_t>(bytes / sizeof(float))});
    forward.saved = {static_cast<std::byte*>(saved.view.data), bytes};
    backward.saved = forward.saved;
  }
};

Problem::Problem(const Case& description) {
  place_buffers(description.device);
  storage_ = std::make_unique<Storage>(description);
}
Problem::~Problem() = default;
MlstmForward& Problem::forward() { return storage_->forward; }
MlstmBackward& Problem::backward() { return storage_->backward; }

void Problem::poison() {
  for (const auto& outputs : {storage_->forward_outputs(), storage_->backward_outputs()}) {
    for (const auto& [tensor_name, tensor] : outputs) {
      if (tensor->given()) tensor->buffer->poison();
    }
  }
  storage_->start_last_state();
}

struct Judge::Answers {
  std::vector<double> h, C, n, m, dq, dk, dv, di, df, dC0, dn0;
  double spread = 0, gate_terms = 0;

  [[nodiscard]] static Answers of(const Problem& problem, bool with_backward, const Roundings& roundings);
  [[nodiscard]] std::map<std::string, const std::vector<double>*> tensors() const {
    return {{"h", &h},   {"C", &C},   {"n", &n},   {"dq", &dq},   {"dk", &dk},
            {"dv", &dv}, {"di", &di}, {"df", &df}, {"dC0", &dC0}, {"dn0", &dn0}};
  }
};

namespace {

// Adds the rows of one head to their place in a [B,T,heads,width] array.
void add_rows(std::vector<double>& all, const std::vector<double>& part, std::int64_t T, std::int64_t heads,
              std::int64_t width, std::int64_t batch, std::int64_t begin, std::int64_t head) {
  for (std::size_t index = 0; index < part.size(); ++index) {
    const auto t = begin + static_cast<std::int64_t>(index) / width, c = static_cast<std::int64_t>(index) % width;
    all[static_cast<std::size_t>(((batch * T + t) * heads + head) * width + c)] += part[index];
  }
}

void place_entry(std::vector<double>& all, const std::vector<double>& part, std::int64_t index) {
  std::copy(part.begin(), part.end(), all.begin() + index * static_cast<std::int64_t>(part.size()));
}

double unit_of_rounding(DType dtype) {
  return dtype == DType::bfloat16 ? 0x1p-8 : dtype == DType::float16 ? 0x1p-11 : 0.0;
}

bool on_tensor_cores(const Case& description) {
  return description.device == Device::cuda && unit_of_rounding(description.shape.dtype) > 0;
}

constexpr std::int64_t many_numbers = 1024;  // of which a relative error is a root mean square

// The range of normal numbers. What lies outside is not an error of arithmetic: float16 ends at 65504.
struct NormalRange {
  double least, largest;
};

NormalRange normal_range(DType dtype) {
  switch (dtype) {
    case DType::float64: return {std::numeric_limits<double>::min(), std::numeric_limits<double>::max()};
    case DType::float16: return {0x1p-14, 65504};
    default: return {std::numeric_limits<float>::min(), std::numeric_limits<float>::max()};
  }
}

// A number nearer to the end of the range may be beyond it when it is off by what it may be off by.
constexpr double judged_part = 0.5;

// Numbers below this are subnormal in the arithmetic itself, which is float32 for 16-bit dtypes: any of them, or zero,
// is as good as another. A float16 is subnormal long before, and has to be right all the same.
double least_in_arithmetic(DType dtype) {
  return dtype == DType::float64 ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
}

// `rescale` holds one factor for each run of equal length, or is empty.
TensorError compare(std::string tensor, const TensorView& view, const std::vector<double>& expected,
                    const std::vector<double>& rescale = {}) {
  TensorError error{.tensor = std::move(tensor), .worst_index = no_index};
  double difference_squares = 0, squares = 0;
  const NormalRange range = normal_range(view.dtype);
  const double lost = least_in_arithmetic(view.dtype);
  const std::size_t run = rescale.empty() ? 1 : expected.size() / rescale.size();
  for (std::size_t index = 0; index < expected.size(); ++index) {
    if (!(std::abs(expected[index]) < judged_part * range.largest)) {
      ++error.beyond;
      continue;
    }
    const auto logical = static_cast<std::int64_t>(index);
    double actual = load(view.data, view.dtype, offset_of(view, logical));
    if (!rescale.empty()) actual *= rescale[index / run];
    if (std::abs(expected[index]) < lost && std::abs(actual) < lost) continue;
    const double difference = std::abs(actual - expected[index]);
    if (!std::isfinite(actual)) {
      if (error.not_finite++ == 0) error.worst_index = logical;
      error.worst = std::numeric_limits<double>::infinity();
    } else if (difference > error.worst || error.worst_index == no_index) {
      error.worst = difference;
      error.worst_index = logical;
    }
    difference_squares += difference * difference;
    squares += expected[index] * expected[index];
  }
  error.worst_index = std::max<std::int64_t>(error.worst_index, 0);
  error.size = std::sqrt(squares);
  error.count = std::ssize(expected);
  if (error.not_finite > 0) {
    error.relative = std::numeric_limits<double>::infinity();
  } else if (difference_squares > 0) {
    // Where the answer is all zeros (the forget gates of one token without a state), the error itself counts; where
    // all of it is subnormal in its dtype, it counts as the least normal numbers.
    const double least = range.least * std::sqrt(static_cast<double>(expected.size()));
    const double norm = squares > 0 ? std::max(std::sqrt(squares), least) : 1;
    error.relative = std::sqrt(difference_squares) / norm;
  }
  return error;
}

// A write outside an output is reported as one more tensor with an infinite error, so that no bound allows it.
void append_broken_margins(std::vector<TensorError>& errors,
                           const std::vector<std::pair<const char*, const Tensor*>>& outputs) {
  for (const auto& [tensor, output] : outputs) {
    if (!output->given() || output->buffer->margins_intact()) continue;
    const double infinity = std::numeric_limits<double>::infinity();
    errors.push_back({.tensor = std::string("outside ") + tensor, .relative = infinity, .worst = infinity});
  }
}

}  // namespace

Judge::Answers Judge::Answers::of(const Problem& problem, bool with_backward, const Roundings& roundings) {
  const Problem::Storage& storage = *problem.storage_;
  const MlstmShape& s = storage.description.shape;
  const std::int64_t heads = s.sequences * s.heads;
  std::vector<HeadResult> results(static_cast<std::size_t>(heads));
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t index = 0; index < heads; ++index) {
    const Head inputs = storage.head_inputs(index / s.heads, index % s.heads, with_backward);
    Roundings own = roundings;
    own.seed = mix(roundings.seed + static_cast<std::uint64_t>(index));
    results[static_cast<std::size_t>(index)] = evaluate(inputs, storage.forward.options, own);
  }

  Answers a;
  const auto zeros = [](std::int64_t count) { return std::vector<double>(static_cast<std::size_t>(count)); };
  const std::int64_t tokens = s.batch * s.tokens, group = s.heads / s.qk_heads;
  a.h = zeros(tokens * s.heads * s.dhv);
  a.C = zeros(heads * s.dqk * s.dhv);
  a.n = zeros(heads * s.dqk);
  a.m = zeros(heads);
  if (with_backward) {
    a.dv = zeros(tokens * s.heads * s.dhv);
    a.dq = a.dk = zeros(tokens * s.qk_heads * s.dqk);
    a.di = a.df = zeros(tokens * s.heads);
    a.dC0 = zeros(heads * s.dqk * s.dhv);
    a.dn0 = zeros(heads * s.dqk);
  }
  for (std::int64_t index = 0; index < heads; ++index) {
    const auto [batch, begin, count] = storage.range(index / s.heads);
    const std::int64_t head = index % s.heads;
    const HeadResult& r = results[static_cast<std::size_t>(index)];
    add_rows(a.h, r.h, s.tokens, s.heads, s.dhv, batch, begin, head);
    place_entry(a.C, r.C, index);
    place_entry(a.n, r.n, index);
    a.m[static_cast<std::size_t>(index)] = r.m;
    a.spread += r.spread;
    if (!with_backward) continue;
    a.gate_terms += r.gate_terms;
    add_rows(a.dq, r.dq, s.tokens, s.qk_heads, s.dqk, batch, begin, head / group);
    add_rows(a.dk, r.dk, s.tokens, s.qk_heads, s.dqk, batch, begin, head / group);
    add_rows(a.dv, r.dv, s.tokens, s.heads, s.dhv, batch, begin, head);
    add_rows(a.di, r.di, s.tokens, s.heads, 1, batch, begin, head);
    add_rows(a.df, r.df, s.tokens, s.heads, 1, batch, begin, head);
    place_entry(a.dC0, r.dC0, index);
    place_entry(a.dn0, r.dn0, index);
  }
  return a;
}

Judge::Judge(const Problem& problem, bool with_backward)
    : problem_(problem),
      with_backward_(with_backward),
      answers_(std::make_unique<Answers>(Answers::of(problem, with_backward, {}))) {}

std::map<std::string, double> Judge::explained(double operands, double norms) const {
  constexpr int draws = 3;
  std::map<std::string, double> squares;
  for (int draw = 0; draw < draws; ++draw) {
    const Roundings roundings{operands, norms, mix(static_cast<std::uint64_t>(draw))};
    const Answers rough = Answers::of(problem_, with_backward_, roundings);
    for (const auto& [tensor, values] : rough.tensors()) {
      const std::vector<double>& exact = *answers_->tensors().at(tensor);
      double difference = 0, size = 0;
      for (std::size_t at = 0; at < exact.size(); ++at) {
        difference += ((*values)[at] - exact[at]) * ((*values)[at] - exact[at]);
        size += exact[at] * exact[at];
      }
      if (size > 0) squares[tensor] += difference / size / draws;
    }
  }
  for (auto& [tensor, square] : squares) square = std::sqrt(square);
  return squares;
}

Judge::~Judge() = default;

std::vector<TensorError> Judge::forward_errors() const {
  wait_for_buffers();
  const Problem::Storage& storage = *problem_.storage_;
  std::vector<TensorError> errors{compare("h", storage.h.view, answers_->h)};
  const double squares = std::inner_product(answers_->h.begin(), answers_->h.end(), answers_->h.begin(), 0.0);
  if (squares > 0) errors.front().spread = std::sqrt(answers_->spread / squares);
  if (storage.m.given()) {
    std::vector<double> rescale = gather(storage.m.view);
    for (std::size_t index = 0; index < rescale.size(); ++index) {
      rescale[index] = std::exp(rescale[index] - answers_->m[index]);
    }
    errors.push_back(compare("C", storage.C.view, answers_->C, rescale));
    errors.push_back(compare("n", storage.n.view, answers_->n, rescale));
  }
  append_broken_margins(errors, storage.forward_outputs());
  return errors;
}

std::vector<TensorError> Judge::backward_errors() const {
  wait_for_buffers();
  const Problem::Storage& storage = *problem_.storage_;
  const Answers& a = *answers_;
  std::vector<TensorError> errors{compare("dq", storage.dq.view, a.dq), compare("dk", storage.dk.view, a.dk),
                                  compare("dv", storage.dv.view, a.dv), compare("di", storage.di.view, a.di),
                                  compare("df", storage.df.view, a.df)};
  errors.back().terms = std::sqrt(a.gate_terms);
  const MlstmShape& s = storage.description.shape;
  if (on_tensor_cores(storage.description) && s.batch * s.tokens * s.heads < many_numbers)
    errors.back().explained = explained(unit_of_rounding(DType::bfloat16) / 2, 0)["df"];
  if (storage.dC0.given()) {
    errors.push_back(compare("dC0", storage.dC0.view, a.dC0));
    errors.push_back(compare("dn0", storage.dn0.view, a.dn0));
  }
  append_broken_margins(errors, storage.backward_outputs());
  return errors;
}

namespace {

// Errors of mlstm_kernels 2.0.6 (mLSTMexp, xl_chunk 128) in bfloat16 on an H200, in the order of all_regimes.
struct Published {
  double h, dq, dk, dv, di, df;
};
constexpr Published published[] = {
    {2.3e-3, 3.6e-3, 4.0e-3, 3.5e-3, 4.2e-3, 1.2e-1}, {2.9e-3, 7.5e-3, 7.8e-3, 7.8e-3, 7.7e-3, 1.7e-2},
    {1.1e-2, 1.4e-2, 1.5e-2, 1.2e-2, 1.7e-2, 4.2e-2}, {5.4e-2, 7.4e-2, 7.2e-2, 4.7e-2, 3.8e-2, 6.6e-2},
    {3.4e-3, 3.8e-3, 4.4e-3, 7.6e-3, 4.6e-2, 8.2e-1}, {6.0e-3, 6.3e-3, 6.6e-3, 6.6e-3, 6.8e-3, 1.2e-2},
    {2.6e-3, 3.1e-3, 3.5e-3, 3.6e-3, 4.0e-3, 1.0e-1}};

double tensor_core_bound(const std::string& tensor, Regime regime) {
  const Published& row = published[static_cast<std::size_t>(regime)];
  if (tensor == "dq") return row.dq;
  if (tensor == "dk") return row.dk;
  if (tensor == "dv") return row.dv;
  if (tensor == "di") return row.di;
  if (tensor == "df") return row.df > 1e-2 ? row.df / 5 : row.df;
  return tensor == "dC0" || tensor == "dn0" ? row.dq : row.h;
}

}  // namespace

double bound(const std::string& tensor, Regime regime, DType dtype, Device device) {
  if (dtype == DType::float64) return 1e-10;
  if (device == Device::cuda && dtype != DType::float32) return tensor_core_bound(tensor, regime);
  const bool gradient = tensor.starts_with('d');
  const double arithmetic = (gradient ? 1e-4 : 1e-5) * (regime == Regime::large_i ? 10 : 1);
  const bool state = tensor == "C" || tensor == "n" || tensor == "dC0" || tensor == "dn0";
  if (state) return arithmetic;
  // Rounding the result: the error is uniform within half a unit of the last place, so its root mean square is about
  // 1.7e-3 of the value in bfloat16 and 2.1e-4 in float16. The bound leaves room for few elements dominating a norm.
  if (dtype == DType::bfloat16) return std::max(2.5e-3, arithmetic);
  if (dtype == DType::float16) return std::max(4e-4, arithmetic);
  return arithmetic;
}

namespace {

DType stored_dtype(const std::string& tensor, const Case& description) {
  return tensor == "di" || tensor == "df" ? description.shape.gate_dtype : description.shape.dtype;
}

}  // namespace

// The bounds take the rounding of a 16-bit number as its root mean square over many elements. Where few elements make
// up the norm, each may be off by the whole unit of rounding: of its own dtype, and on a GPU, where 16-bit products
// read states in bfloat16, of that as well.
double allowed_error(const std::string& tensor, const Case& description) {
  const DType dtype = stored_dtype(tensor, description);
  const MlstmShape& s = description.shape;
  const bool tensor_cores = on_tensor_cores(description);
  double allowed = bound(tensor, description.regime, dtype, description.device);
  if (dtype != s.dtype && description.device == Device::cuda) {
    // Gradients of gates: rounded to the gates' own dtype, but on a GPU made of products in the dtype of q.
    const double products = bound(tensor, description.regime, s.dtype, Device::cuda);
    allowed = std::max(bound(tensor, description.regime, dtype), products);
  }
  const double rounding = unit_of_rounding(dtype) + (tensor_cores ? unit_of_rounding(DType::bfloat16) : 0.0);
  const bool gate = tensor == "di" || tensor == "df", shared = tensor == "dq" || tensor == "dk";
  const std::int64_t row = gate ? s.heads : shared ? s.qk_heads * s.dqk : s.heads * s.dhv;
  // On tensor cores the forget gate's gradients share the error of one rounded state per chunk and head. Few of those
  // make a relative error that scatters: for four, one in forty lies above three times its usual size (F distribution).
  constexpr std::int64_t few_states = 16;
  if (tensor == "df" && tensor_cores) {
    const std::int64_t sequences = description.cu_seqlens.empty() ? s.batch : std::ssize(description.cu_seqlens) - 1;
    MlstmShape one = s;  // a sequence of average length
    one.batch = one.sequences = 1;
    one.tokens = one.longest = s.batch * s.tokens / std::max<std::int64_t>(sequences, 1);
    const std::int64_t chunk = plan(Operation::backward, one, description.options, {.device = Device::cuda}).chunk;
    const std::int64_t chunks = (one.tokens + chunk - 1) / chunk;
    if (sequences * s.heads * chunks < few_states) allowed *= 3;
  }
  if (rounding == 0 || s.batch * s.tokens * row >= many_numbers) return allowed;
  return std::max(allowed, bound(tensor, description.regime, DType::float32) + rounding);
}

double allowed_error(const TensorError& error, const Case& description) {
  const double allowed = allowed_error(error.tensor, description);
  const bool rounds = description.options.formulation == Formulation::recurrent;
  const double unit = description.shape.dtype == DType::float64 ? 0x1p-53 : 0x1p-24;  // of the state
  return std::max(rounds ? std::max(allowed, 4 * unit * error.spread) : allowed, 4 * error.explained);
}

}  // namespace tfla::reference
