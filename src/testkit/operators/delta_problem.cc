#include "testkit/operators/delta_problem.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <ostream>
#include <tuple>

#include "reference/regimes.h"
#include "reference/values.h"

namespace tfla::testkit {
namespace {

using reference::Stream;
using Values = std::vector<double>;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t hole = 3;  // columns of a fused tensor that belong to nothing

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double strength(DeltaRegime regime, double noise, std::int64_t token) {
  switch (regime) {
    case DeltaRegime::faint:
    case DeltaRegime::kept: return 1e-4 * sigmoid(noise);
    case DeltaRegime::every_other: return token % 2 == 0 ? 0 : sigmoid(noise);
    case DeltaRegime::full:
    case DeltaRegime::one_key: return 1;
    case DeltaRegime::twofold: return 2;
    case DeltaRegime::one_key_beyond: return 1.9;
    default: return sigmoid(noise);
  }
}

double log_decay(DeltaRegime regime, double noise, std::int64_t token, std::int64_t head) {
  constexpr double extremes[] = {0, -1e-3, -20, -infinity, -0.5, -100, -1e4, 0};
  const double usual = -std::exp(noise - 2);
  switch (regime) {
    case DeltaRegime::kept: return -1e-6;
    case DeltaRegime::lasting: return -1e-6 * std::exp(noise);
    case DeltaRegime::brief: return -20 - 5 * std::abs(noise);
    case DeltaRegime::gone: return -100 - 20 * std::abs(noise);
    case DeltaRegime::resets: return (token + head) % 7 == 6 ? -infinity : usual;
    case DeltaRegime::growing: return 0.1 * noise;
    case DeltaRegime::extremes: return extremes[(token + 3 * head) % 8];
    default: return usual;
  }
}

// What a gate has to be for this strength.
double raw_beta(double value, WriteGate write) {
  if (write == WriteGate::plain) return value;
  const double part = std::clamp(write == WriteGate::sigmoid ? value : value / 2, 1e-6, 1 - 1e-6);
  return std::log(part / (1 - part));
}

// softplus of the result is y, as far as finite numbers reach: with rates, 700 is a reset and -80 keeps everything.
double softplus_inverse(double y) {
  return std::clamp(y > 30 ? y : std::log(std::expm1(std::max(y, 0.0))), -80.0, 700.0);
}

void fill(const Tensor& tensor, const std::function<double(std::int64_t)>& value) {
  const std::int64_t count = reference::element_count(tensor.view);
  for (std::int64_t index = 0; index < count; ++index)
    reference::store(tensor.view.data, tensor.view.dtype, reference::offset_of(tensor.view, index), value(index));
}

// Columns [begin, begin + heads * width) of a [B,T,row] tensor as [B,T,heads,width], or [B,T,heads] where width is 0.
Tensor columns(const Tensor& all, std::int64_t begin, std::int64_t heads, std::int64_t width) {
  const std::int64_t B = all.view.shape[0], T = all.view.shape[1], row = all.view.shape[2];
  void* data = all.buffer->data() + begin * item_size(all.view.dtype);
  if (width == 0) return {all.buffer, MutableTensorView(data, all.view.dtype, {B, T, heads}, {T * row, row, 1})};
  return {all.buffer, MutableTensorView(data, all.view.dtype, {B, T, heads, width}, {T * row, row, width, 1})};
}

DeltaOutputs given_only(DeltaOutputs all) {
  std::erase_if(all, [](const auto& output) { return !output.second.given(); });
  return all;
}

const char* short_name(DType dtype) {
  switch (dtype) {
    case DType::float32: return "f32";
    case DType::float64: return "f64";
    case DType::bfloat16: return "bf16";
    default: return "f16";
  }
}

Values dense(const Tensor& tensor) { return tensor.given() ? gather(tensor.view) : Values{}; }

}  // namespace

const char* name(DeltaRegime regime) {
  constexpr const char* names[] = {"ordinary", "faint",    "kept",    "every_other",    "full",
                                   "twofold",  "lasting",  "brief",   "gone",           "resets",
                                   "growing",  "extremes", "one_key", "one_key_beyond", "raw_keys"};
  return names[static_cast<std::size_t>(regime)];
}

DeltaProblem::DeltaProblem(const DeltaCase& given) : description(given) {
  DeltaShape& s = description.shape;
  s.packed = !description.cu_seqlens.empty();
  s.sequences = s.packed ? std::ssize(description.cu_seqlens) - 1 : s.batch;
  s.longest = s.packed ? 0 : s.tokens;
  for (std::size_t n = 1; n < description.cu_seqlens.size(); ++n)
    s.longest = std::max(s.longest, description.cu_seqlens[n] - description.cu_seqlens[n - 1]);
  place_buffers(description.device);
  allocate_tokens();
  allocate_rest();
  draw();
  draw_gates();
  fill_arguments();
}

void DeltaProblem::allocate_tokens() {
  const DeltaShape& s = description.shape;
  const bool decays = description.decay != Decay::none;
  const auto rows = [&](std::int64_t heads, std::int64_t width) {
    if (description.layout != Layout::bhtd) return Tensor(s.dtype, {s.batch, s.tokens, heads, width});
    Tensor tensor(s.dtype, {s.batch, heads, s.tokens, width});
    tensor.view = tensor.view.transposed(1, 2);
    return tensor;
  };
  const auto gates = [&](DType dtype) {
    if (description.layout != Layout::bhtd) return Tensor(dtype, {s.batch, s.tokens, s.heads});
    Tensor tensor(dtype, {s.batch, s.heads, s.tokens});
    tensor.view = tensor.view.transposed(1, 2);
    return tensor;
  };
  h_ = rows(s.heads, s.dhv);
  dh_ = rows(s.heads, s.dhv);
  if (description.layout == Layout::fused) {
    const std::int64_t keys = s.qk_heads * s.dqk, row = 2 * keys + s.heads * s.dhv + hole;
    for (auto [first, second, third] : {std::tuple(&q_, &k_, &v_), std::tuple(&dq_, &dk_, &dv_)}) {
      const Tensor all(s.dtype, {s.batch, s.tokens, row});
      *first = columns(all, 0, s.qk_heads, s.dqk);
      *second = columns(all, keys, s.qk_heads, s.dqk);
      *third = columns(all, 2 * keys + hole, s.heads, s.dhv);
      if (first == &dq_) holes_.push_back(columns(all, 2 * keys, hole, 0));
    }
  } else {
    for (Tensor* tensor : {&q_, &k_, &dq_, &dk_}) *tensor = rows(s.qk_heads, s.dqk);
    for (Tensor* tensor : {&v_, &dv_}) *tensor = rows(s.heads, s.dhv);
  }
  if (description.layout == Layout::fused && s.gate_dtype == description.g_dtype) {
    for (auto [first, second] : {std::tuple(&beta_, &g_), std::tuple(&dbeta_, &dg_)}) {
      const Tensor all(s.gate_dtype, {s.batch, s.tokens, 2 * s.heads + hole});
      *first = columns(all, 0, s.heads, 0);
      if (decays) *second = columns(all, s.heads + hole, s.heads, 0);
      if (first == &dbeta_) holes_.push_back(columns(all, s.heads, decays ? hole : s.heads + hole, 0));
    }
    return;
  }
  for (Tensor* tensor : {&beta_, &dbeta_}) *tensor = gates(s.gate_dtype);
  if (!decays) return;
  for (Tensor* tensor : {&g_, &dg_}) *tensor = gates(description.g_dtype);
}

void DeltaProblem::allocate_rest() {
  const DeltaShape& s = description.shape;
  const DType dtype = s.dtype == DType::float64 ? DType::float64 : DType::float32;
  const auto state = [&] { return Tensor(dtype, {s.sequences, s.heads, s.dqk, s.dhv}); };
  if (description.last_state) C_ = state();
  if (description.initial_state) {
    C0_ = state();
    dC0_ = state();
  }
  if (description.last_state_grad) dC_last_ = state();
  if (description.decay == Decay::rate || description.decay == Decay::biased) {
    for (Tensor* tensor : {&A_log_, &dA_log_}) *tensor = Tensor(description.g_dtype, {s.heads});
  }
  if (description.decay == Decay::biased) {
    for (Tensor* tensor : {&dt_bias_, &ddt_bias_}) *tensor = Tensor(description.g_dtype, {s.heads});
  }
}

void DeltaProblem::draw() {
  const DeltaShape& s = description.shape;
  const std::uint64_t seed = description.seed;
  const DeltaRegime regime = description.regime;
  const auto normals = [&](const Tensor& tensor, Stream stream) {
    if (tensor.given()) fill(tensor, [=](std::int64_t index) { return reference::normal(seed, stream, index); });
  };
  normals(q_, Stream::q);
  normals(v_, Stream::v);
  normals(dh_, Stream::dh);
  normals(C0_, Stream::C0);
  normals(dC_last_, Stream::dC_last);
  const bool one_key = regime == DeltaRegime::one_key || regime == DeltaRegime::one_key_beyond;
  const bool raw = description.options.normalize_qk || regime == DeltaRegime::raw_keys;
  const double size = description.options.normalize_qk ? 1 : 1.2 / std::sqrt(static_cast<double>(s.dqk));
  Values row(static_cast<std::size_t>(s.dqk));
  fill(k_, [&](std::int64_t index) {
    const std::int64_t at = index % s.dqk, number = index / s.dqk;
    if (at == 0) {
      const std::int64_t drawn = one_key ? number % s.qk_heads : number;
      double squares = 0;
      for (std::size_t r = 0; r < row.size(); ++r) {
        row[r] = reference::normal(seed, Stream::k, drawn * s.dqk + static_cast<std::int64_t>(r));
        squares += row[r] * row[r];
      }
      for (double& x : row) x *= raw ? size : 1 / std::sqrt(squares);
    }
    return row[static_cast<std::size_t>(at)];
  });
}

void DeltaProblem::draw_gates() {
  const DeltaShape& s = description.shape;
  const std::uint64_t seed = description.seed;
  const DeltaRegime regime = description.regime;
  const auto token = [&](std::int64_t index) { return index / s.heads % s.tokens; };
  fill(beta_, [&](std::int64_t index) {
    const double value = strength(regime, reference::normal(seed, Stream::i, index), token(index));
    return raw_beta(value, description.options.write);
  });
  // Rates and biases of the size that trained models have.
  if (A_log_.given())
    fill(A_log_, [=](std::int64_t head) { return 1 + reference::normal(seed, Stream::n0, head) / 2; });
  if (dt_bias_.given())
    fill(dt_bias_, [=](std::int64_t head) { return reference::normal(seed, Stream::m0, head) - 2; });
  if (!g_.given()) return;
  const Values A_log = dense(A_log_), dt_bias = dense(dt_bias_);
  fill(g_, [&](std::int64_t index) {
    const std::int64_t head = index % s.heads;
    const auto at = static_cast<std::size_t>(head);
    const double value = log_decay(regime, reference::normal(seed, Stream::f, index), token(index), head);
    if (A_log.empty()) return value;
    return softplus_inverse(-value / std::exp(A_log[at])) - (dt_bias.empty() ? 0 : dt_bias[at]);
  });
}

void DeltaProblem::fill_arguments() {
  TensorView boundaries;
  if (!description.cu_seqlens.empty()) {
    const std::int64_t count = std::ssize(description.cu_seqlens), stride = description.index_stride;
    packing_ = Tensor(DType::int64, {count * stride});
    auto* numbers = static_cast<std::int64_t*>(packing_.view.data);
    std::fill_n(numbers, count * stride, 1);
    for (std::int64_t n = 0; n < count; ++n) numbers[n * stride] = description.cu_seqlens[static_cast<std::size_t>(n)];
    boundaries = TensorView(numbers, DType::int64, {count}, {stride});
  }
  start_last_state();
  forward = {.q = q_.view,
             .k = k_.view,
             .v = v_.view,
             .beta = beta_.view,
             .g = g_.view,
             .A_log = A_log_.view,
             .dt_bias = dt_bias_.view,
             .h = h_.view,
             .initial_state = description.in_place ? C_.view : C0_.view,
             .last_state = C_.view,
             .cu_seqlens = boundaries,
             .options = description.options};
  backward = {.q = q_.view,
              .k = k_.view,
              .v = v_.view,
              .beta = beta_.view,
              .g = g_.view,
              .A_log = A_log_.view,
              .dt_bias = dt_bias_.view,
              .dh = dh_.view,
              .dq = dq_.view,
              .dk = dk_.view,
              .dv = dv_.view,
              .dbeta = dbeta_.view,
              .dg = dg_.view,
              .dA_log = dA_log_.view,
              .ddt_bias = ddt_bias_.view,
              .initial_state = C0_.view,
              .dlast_state = dC_last_.view,
              .dinitial_state = dC0_.view,
              .cu_seqlens = boundaries,
              .options = description.options};
}

void DeltaProblem::start_last_state() const {
  if (description.in_place) scatter(C_.view, gather(C0_.view));
}

void DeltaProblem::poison() {
  for (const Tensor* tensor : {&h_, &C_, &dq_, &dk_, &dv_, &dbeta_, &dg_, &dA_log_, &ddt_bias_, &dC0_}) {
    if (tensor->given()) tensor->buffer->poison();
  }
  start_last_state();
}

bool DeltaProblem::surroundings_intact() const {
  for (const Tensor* tensor : {&h_, &C_, &dq_, &dk_, &dv_, &dbeta_, &dg_, &dA_log_, &ddt_bias_, &dC0_}) {
    if (tensor->given() && !tensor->buffer->margins_intact()) return false;
  }
  return std::all_of(holes_.begin(), holes_.end(), [](const Tensor& tensor) {
    const Values values = gather(tensor.view);
    return std::all_of(values.begin(), values.end(), [](double x) { return std::isnan(x); });
  });
}

reference::DeltaCall DeltaProblem::call() const {
  const DeltaShape& s = description.shape;
  return {.batch = s.batch,
          .tokens = s.tokens,
          .qk_heads = s.qk_heads,
          .heads = s.heads,
          .dqk = s.dqk,
          .dhv = s.dhv,
          .cu_seqlens = description.cu_seqlens,
          .q = dense(q_),
          .k = dense(k_),
          .v = dense(v_),
          .beta = dense(beta_),
          .g = dense(g_),
          .A_log = dense(A_log_),
          .dt_bias = dense(dt_bias_),
          .initial_state = dense(C0_),
          .dh = dense(dh_),
          .dlast_state = dense(dC_last_)};
}

DeltaOutputs outputs(const DeltaForward& args) { return given_only({{"h", args.h}, {"C", args.last_state}}); }

DeltaOutputs outputs(const DeltaBackward& args) {
  return given_only({{"dq", args.dq},
                     {"dk", args.dk},
                     {"dv", args.dv},
                     {"dbeta", args.dbeta},
                     {"dg", args.dg},
                     {"dA_log", args.dA_log},
                     {"ddt_bias", args.ddt_bias},
                     {"dC0", args.dinitial_state}});
}

DeltaOutputs outputs(const DeltaStep& args) { return given_only({{"h", args.h}, {"C", args.state}}); }

std::string label(const DeltaCase& c) {
  constexpr const char* writes[] = {"plain", "sigmoid", "twice"};
  constexpr const char* decays[] = {"none", "log", "rate", "biased"};
  constexpr const char* layouts[] = {"bthd", "bhtd", "fused"};
  std::string text = name(c.regime);
  text += std::string("_") + short_name(c.shape.dtype) + "_beta" + short_name(c.shape.gate_dtype) + "_g" +
          short_name(c.g_dtype) + "_" + decays[static_cast<int>(c.decay)] + "_" +
          writes[static_cast<int>(c.options.write)];
  for (const auto& [axis, value] :
       {std::pair("_B", c.shape.batch), std::pair("_T", c.shape.tokens), std::pair("_Hqk", c.shape.qk_heads),
        std::pair("_H", c.shape.heads), std::pair("_dqk", c.shape.dqk), std::pair("_dhv", c.shape.dhv),
        std::pair("_L", c.options.chunk_size), std::pair("_threads", std::int64_t{c.threads})}) {
    text += axis + std::to_string(value);
  }
  if (!c.cu_seqlens.empty()) {
    text += "_packed" + std::to_string(c.cu_seqlens.size() - 1);
    if (c.cu_seqlens.back() < c.shape.tokens) text += "_padded";
  }
  text += std::string("_") + layouts[static_cast<int>(c.layout)];
  if (c.options.normalize_qk) text += "_normalized";
  if (c.options.qk_scale) text += "_scale";
  if (c.initial_state) text += c.in_place ? "_inplace" : "_state";
  if (!c.last_state) text += "_nolaststate";
  if (c.last_state_grad) text += "_laststategrad";
  if (c.seed != 1) text += "_seed" + std::to_string(c.seed);
  return text;
}

void PrintTo(const DeltaCase& description, std::ostream* out) { *out << label(description); }

}  // namespace tfla::testkit
