#include "testkit/problem.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numbers>

#include "core/gate_family.h"
#include "reference/values.h"
#include "testkit/storage.h"

namespace tfla::testkit {
namespace {

// Calls value(logical index) for every element, in parallel: a number depends on its index alone.
void fill(const Tensor& tensor, const std::function<double(std::int64_t)>& value) {
  const std::int64_t count = reference::element_count(tensor.view);
#pragma omp parallel for schedule(static)
  for (std::int64_t index = 0; index < count; ++index) {
    reference::store(tensor.view.data, tensor.view.dtype, reference::offset_of(tensor.view, index), value(index));
  }
}

}  // namespace

void Problem::Storage::draw() {
  const MlstmShape& s = description.shape;
  const std::uint64_t seed = description.seed;
  const Regime regime = description.regime;
  const double scale = s.dtype == DType::float16 ? reference::float16_scale(regime) : 1;
  const auto normals = [&](const Tensor& tensor, reference::Stream stream, double factor) {
    fill(tensor, [=](std::int64_t index) { return factor * reference::normal(seed, stream, index); });
  };
  normals(q, reference::Stream::q, 1);
  normals(k, reference::Stream::k, 1);
  normals(v, reference::Stream::v, scale);
  normals(dh, reference::Stream::dh, scale);
  normals(C0, reference::Stream::C0, 1);
  normals(n0, reference::Stream::n0, 1);
  normals(m0, reference::Stream::m0, 1);
  normals(dC_last, reference::Stream::dC_last, 1);
  normals(dn_last, reference::Stream::dn_last, 1);
  // Where a gate is its logarithm: the decays of the regime, and without a max state input weights up to 2.
  const GateFamily family = gate_family(description.options.gate);
  const bool log_input = family.input == GateLog::identity && !family.has_max_state;
  const bool log_forget = family.forget == GateLog::identity;
  fill(i, [=](std::int64_t index) {
    const double raw = reference::input_gate(regime, reference::normal(seed, reference::Stream::i, index));
    return log_input ? reference::log_sigmoid(raw) + std::numbers::ln2 : raw;
  });
  fill(f, [=](std::int64_t index) {
    const std::int64_t token = index / s.heads % s.tokens, head = index % s.heads;
    const double raw =
        reference::forget_gate(regime, reference::normal(seed, reference::Stream::f, index), token, head, s.heads);
    return log_forget ? reference::log_sigmoid(raw) : raw;
  });
}

void Problem::Storage::fill_arguments() {
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

}  // namespace tfla::testkit
