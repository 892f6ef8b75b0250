#include "testkit/storage.h"

#include <algorithm>
#include <cstddef>
#include <tuple>

#include "reference/values.h"

namespace tfla::testkit {
namespace {

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

// The rows [begin, begin + count) of one head of a [B,T,heads,width] or [B,T,heads] tensor, dense.
std::vector<double> values_of_head(const TensorView& view, std::int64_t batch, std::int64_t begin, std::int64_t count,
                                   std::int64_t head) {
  const std::int64_t width = view.rank == 4 ? view.shape[3] : 1;
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(count * width));
  for (std::int64_t t = begin; t < begin + count; ++t) {
    const std::int64_t start = batch * view.strides[0] + t * view.strides[1] + head * view.strides[2];
    for (std::int64_t c = 0; c < width; ++c) values.push_back(reference::load(view.data, view.dtype, start + c));
  }
  return values;
}

// Entry (sequence, head) of a dense [N,H,...] tensor.
std::vector<double> entry(const TensorView& view, std::int64_t index) {
  if (!view.given()) return {};
  const std::int64_t size = reference::element_count(view) / (view.shape[0] * view.shape[1]);
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(size));
  for (std::int64_t c = 0; c < size; ++c) values.push_back(reference::load(view.data, view.dtype, index * size + c));
  return values;
}

}  // namespace

Problem::Storage::Storage(const Case& given) : description(given), cu_seqlens(given.cu_seqlens) {
  derive_sequences();
  allocate_tokens();
  allocate_states();
  draw();
  fill_arguments();
}

reference::Head Problem::Storage::head_inputs(std::int64_t sequence, std::int64_t head, bool with_backward) const {
  const MlstmShape& shape = description.shape;
  const auto [batch, begin, count] = range(sequence);
  const std::int64_t qk_head = head / (shape.heads / shape.qk_heads), state = sequence * shape.heads + head;
  reference::Head inputs;
  inputs.tokens = count;
  inputs.dqk = shape.dqk;
  inputs.dhv = shape.dhv;
  inputs.q = values_of_head(q.view, batch, begin, count, qk_head);
  inputs.k = values_of_head(k.view, batch, begin, count, qk_head);
  inputs.v = values_of_head(v.view, batch, begin, count, head);
  inputs.i = values_of_head(i.view, batch, begin, count, head);
  inputs.f = values_of_head(f.view, batch, begin, count, head);
  inputs.C0 = entry(C0.view, state);
  inputs.n0 = entry(n0.view, state);
  if (m0.given()) inputs.m0 = entry(m0.view, state).front();
  if (with_backward) {
    inputs.dh = values_of_head(dh.view, batch, begin, count, head);
    inputs.dC_last = entry(dC_last.view, state);
    inputs.dn_last = entry(dn_last.view, state);
  }
  return inputs;
}

void Problem::Storage::start_last_state() const {
  if (!description.in_place) return;
  for (const auto& [from, to] : {std::pair(&C0, &C), std::pair(&n0, &n), std::pair(&m0, &m)})
    scatter(to->view, gather(from->view));
}

void Problem::Storage::derive_sequences() {
  MlstmShape& shape = description.shape;
  shape.packed = !cu_seqlens.empty();
  shape.sequences = shape.packed ? static_cast<std::int64_t>(cu_seqlens.size()) - 1 : shape.batch;
  shape.longest = 0;
  for (std::int64_t s = 0; s < shape.sequences; ++s) shape.longest = std::max(shape.longest, range(s).count);
}

void Problem::Storage::allocate_tokens() {
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

void Problem::Storage::allocate_states() {
  const MlstmShape& s = description.shape;
  const std::int64_t N = s.sequences;
  const DType dtype = s.dtype == DType::float64 ? DType::float64 : DType::float32;
  const auto matrix = [&] { return Tensor(dtype, {N, s.heads, s.dqk, s.dhv}); };
  const auto vector = [&] { return Tensor(dtype, {N, s.heads, s.dqk}); };
  const auto scalar = [&] { return Tensor(dtype, {N, s.heads}); };
  if (N > 0 && description.last_state) {
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

}  // namespace tfla::testkit
