#include "testkit/operators/ssd_problem.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <tuple>

#include "reference/values.h"

namespace tfla::testkit {
namespace {

using Values = std::vector<double>;

// Columns [begin, begin + heads * width) of a [B,T,row] tensor as [B,T,heads,width], or [B,T,heads] where width is 0.
Tensor columns(const Tensor& all, std::int64_t begin, std::int64_t heads, std::int64_t width) {
  const std::int64_t B = all.view.shape[0], T = all.view.shape[1], row = all.view.shape[2];
  void* data = all.buffer->data() + begin * item_size(all.view.dtype);
  if (width == 0) return {all.buffer, MutableTensorView(data, all.view.dtype, {B, T, heads}, {T * row, row, 1})};
  return {all.buffer, MutableTensorView(data, all.view.dtype, {B, T, heads, width}, {T * row, row, width, 1})};
}

Values dense(const Tensor& tensor) { return tensor.given() ? gather(tensor.view) : Values{}; }

// The numbers themselves: 64 bits do not fit into a double.
std::vector<std::int64_t> integers(const Tensor& tensor) {
  std::vector<std::int64_t> all;
  const std::int64_t count = tensor.given() ? reference::element_count(tensor.view) : 0;
  for (std::int64_t index = 0; index < count; ++index) {
    const std::int64_t at = reference::offset_of(tensor.view, index);
    all.push_back(tensor.view.dtype == DType::int32 ? static_cast<const std::int32_t*>(tensor.view.data)[at]
                                                    : static_cast<const std::int64_t*>(tensor.view.data)[at]);
  }
  return all;
}

}  // namespace

SsdProblem::SsdProblem(const SsdCase& given) : description(given) {
  MlstmShape& s = description.shape;
  s.packed = !description.cu_seqlens.empty();
  s.sequences = s.packed ? std::ssize(description.cu_seqlens) - 1 : s.batch;
  s.longest = s.packed ? 0 : s.tokens;
  for (std::size_t n = 1; n < description.cu_seqlens.size(); ++n)
    s.longest = std::max(s.longest, description.cu_seqlens[n] - description.cu_seqlens[n - 1]);
  place_buffers(description.device);
  allocate_tokens();
  allocate_heads();
  allocate_states();
  draw();
  draw_time_steps();
  draw_numbers();
  fill_arguments();
}

void SsdProblem::allocate_tokens() {
  const MlstmShape& s = description.shape;
  const bool heads_first = description.layout == Layout::bhtd;
  const auto rows = [&](std::int64_t heads, std::int64_t width) {
    if (!heads_first) return Tensor(s.dtype, {s.batch, s.tokens, heads, width});
    Tensor tensor(s.dtype, {s.batch, heads, s.tokens, width});
    tensor.view = tensor.view.transposed(1, 2);
    return tensor;
  };
  const auto steps = [&] {
    if (!heads_first) return Tensor(s.gate_dtype, {s.batch, s.tokens, s.heads});
    Tensor tensor(s.gate_dtype, {s.batch, s.heads, s.tokens});
    tensor.view = tensor.view.transposed(1, 2);
    return tensor;
  };
  for (Tensor* tensor : {&y_, &dy_}) *tensor = rows(s.heads, s.dhv);
  if (description.z) ungated_ = rows(s.heads, s.dhv);
  if (description.layout == Layout::fused) {
    allocate_fused();
  } else {
    for (Tensor* tensor : {&x_, &dx_}) *tensor = rows(s.heads, s.dhv);
    for (Tensor* tensor : {&B_, &C_, &dB_, &dC_}) *tensor = rows(s.qk_heads, s.dqk);
    if (description.z) z_ = rows(s.heads, s.dhv);
    if (description.z) dz_ = rows(s.heads, s.dhv);
  }
  if (description.layout != Layout::fused || s.gate_dtype != s.dtype) {
    for (Tensor* tensor : {&dt_, &ddt_}) *tensor = steps();
  }
  if (description.seq_idx == Numbers::none) return;
  const DType dtype = description.seq_idx == Numbers::int32 ? DType::int32 : DType::int64;
  seq_idx_ = heads_first ? Tensor(dtype, {s.tokens, s.batch}) : Tensor(dtype, {s.batch, s.tokens});
  if (heads_first) seq_idx_.view = seq_idx_.view.transposed(0, 1);
}

void SsdProblem::allocate_fused() {
  const MlstmShape& s = description.shape;
  const bool with_dt = s.gate_dtype == s.dtype;
  const std::int64_t inner = s.heads * s.dhv, group = s.qk_heads * s.dqk, hole = description.hole;
  const std::int64_t x_at = inner, B_at = x_at + inner + hole, C_at = B_at + group, dt_at = C_at + group;
  for (auto [z, x, B, C, dt] : {std::tuple(&z_, &x_, &B_, &C_, &dt_), std::tuple(&dz_, &dx_, &dB_, &dC_, &ddt_)}) {
    const Tensor all(s.dtype, {s.batch, s.tokens, dt_at + s.heads});
    if (description.z) *z = columns(all, 0, s.heads, s.dhv);
    *x = columns(all, x_at, s.heads, s.dhv);
    *B = columns(all, B_at, s.qk_heads, s.dqk);
    *C = columns(all, C_at, s.qk_heads, s.dqk);
    if (with_dt) *dt = columns(all, dt_at, s.heads, 0);
    if (x != &dx_) continue;
    holes_.push_back(columns(all, x_at + inner, hole, 0));
    if (!description.z) holes_.push_back(columns(all, 0, inner, 0));
    if (!with_dt) holes_.push_back(columns(all, dt_at, s.heads, 0));
  }
}

// A number per head, in one of the layouts as the middle column of a table.
Tensor SsdProblem::of_heads(DType dtype, bool output) {
  const std::int64_t heads = description.shape.heads;
  if (description.layout != Layout::bhtd) return {dtype, {heads}};
  const Tensor table(dtype, {heads, 3});
  const auto column = [&](std::int64_t at) {
    return Tensor(table.buffer, MutableTensorView(table.buffer->data() + at * item_size(dtype), dtype, {heads}, {3}));
  };
  if (output) holes_.insert(holes_.end(), {column(0), column(2)});
  return column(1);
}

void SsdProblem::allocate_heads() {
  const MlstmShape& s = description.shape;
  A_ = of_heads(description.A_dtype, false);
  dA_ = of_heads(description.A_dtype, true);
  if (description.dt_bias) dt_bias_ = of_heads(description.A_dtype, false);
  if (description.dt_bias) ddt_bias_ = of_heads(description.A_dtype, true);
  if (description.skip == Skip::per_head) {
    D_ = of_heads(description.D_dtype, false);
    dD_ = of_heads(description.D_dtype, true);
  }
  if (description.skip != Skip::per_channel) return;
  const bool turned = description.layout == Layout::bhtd;
  for (Tensor* tensor : {&D_, &dD_}) {
    *tensor = turned ? Tensor(description.D_dtype, {s.dhv, s.heads}) : Tensor(description.D_dtype, {s.heads, s.dhv});
    if (turned) tensor->view = tensor->view.transposed(0, 1);
  }
}

void SsdProblem::allocate_states() {
  const MlstmShape& s = description.shape;
  const DType dtype = s.dtype == DType::float64 ? DType::float64 : DType::float32;
  const auto state = [&] {
    if (!description.turned_states) return Tensor(dtype, {s.sequences, s.heads, s.dhv, s.dqk});
    Tensor tensor(dtype, {s.sequences, s.heads, s.dqk, s.dhv});
    tensor.view = tensor.view.transposed(2, 3);
    return tensor;
  };
  if (description.last_state) S_ = state();
  if (description.initial_state) {
    S0_ = state();
    dS0_ = state();
  }
  if (description.last_state_grad) dS_last_ = state();
}

void SsdProblem::fill_arguments() {
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
  forward = {.x = x_.view,
             .dt = dt_.view,
             .A = A_.view,
             .B = B_.view,
             .C = C_.view,
             .D = D_.view,
             .z = z_.view,
             .dt_bias = dt_bias_.view,
             .y = y_.view,
             .ungated = ungated_.view,
             .initial_state = description.in_place ? S_.view : S0_.view,
             .last_state = S_.view,
             .cu_seqlens = boundaries,
             .seq_idx = seq_idx_.view,
             .options = description.options};
  backward = {.x = x_.view,
              .dt = dt_.view,
              .A = A_.view,
              .B = B_.view,
              .C = C_.view,
              .D = D_.view,
              .z = z_.view,
              .dt_bias = dt_bias_.view,
              .ungated = ungated_.view,
              .dy = dy_.view,
              .dx = dx_.view,
              .ddt = ddt_.view,
              .dA = dA_.view,
              .dB = dB_.view,
              .dC = dC_.view,
              .dD = dD_.view,
              .dz = dz_.view,
              .ddt_bias = ddt_bias_.view,
              .initial_state = S0_.view,
              .dlast_state = dS_last_.view,
              .dinitial_state = dS0_.view,
              .cu_seqlens = boundaries,
              .seq_idx = seq_idx_.view,
              .options = description.options};
}

SsdStep SsdProblem::step(const MutableTensorView& state) const {
  return {.x = x_.view,
          .dt = dt_.view,
          .A = A_.view,
          .B = B_.view,
          .C = C_.view,
          .D = D_.view,
          .z = z_.view,
          .dt_bias = dt_bias_.view,
          .y = y_.view,
          .state = state,
          .options = description.options};
}

void SsdProblem::start_last_state() const {
  if (description.in_place) scatter(S_.view, gather(S0_.view));
}

void SsdProblem::poison_forward() {
  for (const Tensor* tensor : {&y_, &ungated_, &S_}) {
    if (tensor->given()) tensor->buffer->poison();
  }
  start_last_state();
}

void SsdProblem::poison_backward() {
  for (const Tensor* tensor : {&dx_, &ddt_, &dA_, &dB_, &dC_, &dD_, &dz_, &ddt_bias_, &dS0_}) {
    if (tensor->given()) tensor->buffer->poison();
  }
}

bool SsdProblem::surroundings_intact() const {
  for (const Tensor* tensor : {&y_, &ungated_, &S_, &dx_, &ddt_, &dA_, &dB_, &dC_, &dD_, &dz_, &ddt_bias_, &dS0_}) {
    if (tensor->given() && !tensor->buffer->margins_intact()) return false;
  }
  return std::all_of(holes_.begin(), holes_.end(), [](const Tensor& tensor) {
    const Values values = gather(tensor.view);
    return std::all_of(values.begin(), values.end(), [](double x) { return std::isnan(x); });
  });
}

reference::SsdCall SsdProblem::call() const {
  const MlstmShape& s = description.shape;
  return {.batch = s.batch,
          .tokens = s.tokens,
          .groups = s.qk_heads,
          .heads = s.heads,
          .dim = s.dhv,
          .state_dim = s.dqk,
          .cu_seqlens = description.cu_seqlens,
          .seq_idx = integers(seq_idx_),
          .x = dense(x_),
          .dt = dense(dt_),
          .A = dense(A_),
          .B = dense(B_),
          .C = dense(C_),
          .D = dense(D_),
          .z = dense(z_),
          .dt_bias = dense(dt_bias_),
          .initial_state = dense(S0_),
          .dy = dense(dy_),
          .dlast_state = dense(dS_last_)};
}

}  // namespace tfla::testkit
