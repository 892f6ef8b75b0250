#include "tests/conv/problem.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <sstream>
#include <utility>

namespace tfla::test {

using testkit::gather;
using testkit::Tensor;

namespace {

double norm(const Values& values) {
  double squares = 0;
  for (const double x : values) squares += x * x;
  return std::sqrt(squares);
}

}  // namespace

Tensor index_tensor(DType dtype, std::initializer_list<std::int64_t> shape, const std::vector<std::int64_t>& values) {
  Tensor tensor(dtype, shape);
  for (std::size_t at = 0; at < values.size(); ++at) {
    if (dtype == DType::int32) {
      static_cast<std::int32_t*>(tensor.view.data)[at] = static_cast<std::int32_t>(values[at]);
    } else {
      static_cast<std::int64_t*>(tensor.view.data)[at] = values[at];
    }
  }
  return tensor;
}

Execution execution_of(const ConvCase& c) {
  return {.device = c.device, .threads = c.threads, .portable = c.device == Device::cuda, .untested = true};
}

ConvCase conv_case(ConvKind kind, ConvCase c) {
  const std::int64_t T = c.tokens;
  c.silu = kind != ConvKind::plain;
  c.bias = kind == ConvKind::activated || kind == ConvKind::stateful;
  c.state = kind == ConvKind::stateful || kind == ConvKind::packed;
  c.state_dtype = c.dtype == DType::float64 ? DType::float64 : kind == ConvKind::packed ? c.dtype : DType::float32;
  c.weight_dtype = kind == ConvKind::activated       ? c.dtype
                   : c.state_dtype == DType::float64 ? DType::float64
                                                     : DType::float32;
  if (kind == ConvKind::packed) {
    c.batch = 1;
    c.cu_seqlens = {0, T / 4, T / 4, T / 4 + T / 8, T - T / 5};  // one is empty, and padding follows
  } else if (kind == ConvKind::numbered) {
    for (std::int64_t b = 0; b < c.batch; ++b)
      for (std::int64_t t = 0; t < T; ++t) c.seq_idx.push_back(t >= T - 2 ? -1 : (t + 7 * b) * 5 / (T + 1));
  }
  return c;
}

std::vector<ConvCase> conv_cases() {
  constexpr std::int64_t channels[] = {5, 19, 24, 1};
  std::vector<ConvCase> all;
  for (const ConvKind kind : conv_kinds) {
    for (const DType dtype : conv_dtypes) {
      for (const ConvLayout layout : {ConvLayout::channels, ConvLayout::tokens, ConvLayout::apart}) {
        for (const std::int64_t width : {1, 2, 3, 4, 5}) {
          for (const std::int64_t tokens : {0, 1, 2, 3, 5, 64, 257}) {
            all.push_back(conv_case(kind, {.tokens = tokens,
                                           .channels = channels[all.size() % 4],
                                           .width = width,
                                           .dtype = dtype,
                                           .layout = layout}));
          }
        }
      }
    }
  }
  return all;
}

void ConvOnDevice::SetUp() {
  if (const std::string reason = why_unavailable(GetParam()); !reason.empty()) GTEST_SKIP() << reason;
}
ConvCase ConvOnDevice::here(ConvCase c) {
  c.device = GetParam();
  return c;
}

std::string label(const ConvCase& c) {
  std::ostringstream all;
  all << "B" << c.batch << " T" << c.tokens << " D" << c.channels << " W" << c.width << " " << name(c.dtype)
      << (c.layout == ConvLayout::channels ? ""
          : c.layout == ConvLayout::tokens ? " along tokens"
                                           : " apart")
      << (c.silu ? " silu" : "") << (c.bias ? " bias" : "") << (c.state ? " state" : "")
      << (c.cu_seqlens.empty() ? "" : " packed") << (c.seq_idx.empty() ? "" : " numbered")
      << (c.device == Device::cuda ? " cuda" : "");
  return all.str();
}

Tensor ConvProblem::tokens_tensor(DType dtype) const {
  const ConvCase& c = description;
  if (c.layout == ConvLayout::channels) return {dtype, {c.batch, c.tokens, c.channels}};
  if (c.layout == ConvLayout::tokens) {
    Tensor tensor(dtype, {c.batch, c.channels, c.tokens});
    tensor.view = tensor.view.transposed(1, 2);
    return tensor;
  }
  Tensor tensor(dtype, {c.batch, c.tokens, 2 * c.channels});
  tensor.view.shape[2] = c.channels;
  tensor.view.strides[2] = 2;
  return tensor;
}

void ConvProblem::draw(const TensorView& view, double scale) {
  std::mt19937 numbers(seed_++);
  std::normal_distribution<double> normal(0, scale);
  Values values(gather(view).size());
  for (double& x : values) x = normal(numbers);
  overwrite(view, values);
}

ConvProblem::ConvProblem(const ConvCase& c) : description(c) {
  testkit::place_buffers(c.device);
  const std::int64_t sequences = c.cu_seqlens.empty() ? c.batch : static_cast<std::int64_t>(c.cu_seqlens.size()) - 1;
  for (Tensor* tensor : {&x_, &y_, &dy_, &dx_}) *tensor = tokens_tensor(c.dtype);
  for (Tensor* tensor : {&weight_, &dweight_}) *tensor = Tensor(c.weight_dtype, {c.channels, c.width});
  draw(x_.view, 1);
  draw(dy_.view, 1);
  draw(weight_.view, 0.5);
  if (c.bias) {
    for (Tensor* tensor : {&bias_, &dbias_}) *tensor = Tensor(c.weight_dtype, {c.channels});
    draw(bias_.view, 1);
  }
  if (c.seq_idx.empty()) {
    last_ = Tensor(c.state_dtype, {sequences, c.width - 1, c.channels});
    dlast_ = Tensor(c.state_dtype, {sequences, c.width - 1, c.channels});
    draw(dlast_.view, 1);
  }
  if (c.state) {
    // Channels before rows in memory: states take any strides.
    for (Tensor* tensor : {&initial_, &dinitial_}) {
      *tensor = Tensor(c.state_dtype, {sequences, c.channels, c.width - 1});
      tensor->view = tensor->view.transposed(1, 2);
    }
    draw(initial_.view, 1);
  }
  if (!c.cu_seqlens.empty())
    packing_ = index_tensor(DType::int32, {static_cast<std::int64_t>(c.cu_seqlens.size())}, c.cu_seqlens);
  if (!c.seq_idx.empty()) numbers_ = index_tensor(DType::int32, {c.batch, c.tokens}, c.seq_idx);
  const ConvOptions options{c.silu ? ConvActivation::silu : ConvActivation::none};
  forward = {.x = x_.view,
             .weight = weight_.view,
             .bias = bias_.view,
             .y = y_.view,
             .initial_state = initial_.view,
             .last_state = last_.view,
             .cu_seqlens = packing_.view,
             .seq_idx = numbers_.view,
             .options = options};
  backward = {.x = x_.view,
              .weight = weight_.view,
              .bias = bias_.view,
              .dy = dy_.view,
              .dx = dx_.view,
              .dweight = dweight_.view,
              .dbias = dbias_.view,
              .initial_state = initial_.view,
              .dlast_state = dlast_.view,
              .dinitial_state = dinitial_.view,
              .cu_seqlens = packing_.view,
              .seq_idx = numbers_.view,
              .options = options};
}

void ConvProblem::poison() {
  for (Tensor* tensor : {&y_, &last_, &dx_, &dweight_, &dbias_, &dinitial_}) {
    if (tensor->given()) tensor->buffer->poison();
  }
}

bool ConvProblem::margins_intact() const {
  testkit::wait_for_buffers();
  bool intact = true;
  for (const Tensor* tensor : {&y_, &last_, &dx_, &dweight_, &dbias_, &dinitial_})
    intact = intact && (!tensor->given() || tensor->buffer->margins_intact());
  return intact;
}

reference::ConvCall ConvProblem::call() const {
  const ConvCase& c = description;
  const auto values = [](const Tensor& tensor) { return tensor.given() ? gather(tensor.view) : Values{}; };
  return {.batch = c.batch,
          .tokens = c.tokens,
          .channels = c.channels,
          .width = c.width,
          .silu = c.silu,
          .x = values(x_),
          .weight = values(weight_),
          .bias = values(bias_),
          .initial_state = values(initial_),
          .cu_seqlens = c.cu_seqlens,
          .seq_idx = c.seq_idx,
          .dy = values(dy_),
          .dlast_state = values(dlast_)};
}

Snapshot ConvProblem::contents() const {
  Snapshot all;
  for (const auto& [name, tensor] :
       {std::pair("y", &y_), std::pair("last_state", &last_), std::pair("dx", &dx_), std::pair("dweight", &dweight_),
        std::pair("dbias", &dbias_), std::pair("dinitial_state", &dinitial_)}) {
    if (tensor->given()) all[name] = gather(tensor->view);
  }
  return all;
}

Snapshot ConvProblem::run() {
  poison();
  conv_forward(forward, execution_of(description));
  conv_backward(backward, execution_of(description));
  return contents();
}

::testing::AssertionResult within_bounds(const ConvCase& c, const Snapshot& actual,
                                         const reference::ConvResult& expected) {
  const double arithmetic = c.dtype == DType::float64 ? 0x1p-53 : 0x1p-24;
  // A sum of W products and the bias, and an activation of some operations; terms are about 1 each.
  const double roundings = static_cast<double>(c.width + 8);
  const auto unit = [](DType dtype) {
    return dtype == DType::float64 ? 0x1p-53 : std::max(testkit::unit_of_rounding(dtype), 0x1p-24);
  };
  const struct {
    const char* name;
    const Values& values;
    DType dtype;
    double terms;
  } rows[] = {
      {"y", expected.y, c.dtype, std::sqrt(static_cast<double>(expected.y.size()))},
      {"last_state", expected.last_state, c.state_dtype, 0},
      {"dx", expected.dx, c.dtype, std::sqrt(static_cast<double>(expected.dx.size()))},
      {"dweight", expected.dweight, c.weight_dtype, 4 * expected.dweight_terms},
      {"dbias", expected.dbias, c.weight_dtype, 4 * expected.dbias_terms},
      {"dinitial_state", expected.dinitial_state, c.state_dtype,
       std::sqrt(static_cast<double>(expected.dinitial_state.size()))},
  };
  for (const auto& row : rows) {
    if (!actual.contains(row.name)) continue;
    const Values& found = actual.at(row.name);
    if (found.size() != row.values.size()) return ::testing::AssertionFailure() << row.name << " has another size";
    Values apart(found.size());
    for (std::size_t at = 0; at < found.size(); ++at) apart[at] = found[at] - row.values[at];
    const double allowed = roundings * arithmetic * row.terms + unit(row.dtype) * norm(row.values);
    if (!(norm(apart) <= allowed)) {
      return ::testing::AssertionFailure() << label(c) << ": " << row.name << " is off by " << norm(apart) << " of "
                                           << norm(row.values) << ", allowed are " << allowed;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tfla::test
