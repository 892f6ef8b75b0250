#include "cli/support/workload.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/huge_pages.h"
#include "plan/backend.h"
#include "reference/regimes.h"
#include "reference/values.h"

namespace tfla::cli {
namespace {

using reference::Stream;

constexpr std::uint64_t seed = 1;

struct Normal {
  double mean = 0;
  double deviation = 1;
};
constexpr Normal standard;
constexpr Normal input_gate = {-4, 1};
constexpr Normal forget_gate = {4.5, 1};
constexpr Normal log_decay = {-0.5, 0.1};

std::size_t bytes_of(DType dtype, std::int64_t count) { return static_cast<std::size_t>(item_size(dtype) * count); }

Buffer filled(DType dtype, std::int64_t count, Stream stream, Normal law, Device device) {
  // Tensors of a GPU are large and the host is slow to draw them: the same numbers again and again, at other addresses.
  constexpr std::int64_t most_on_gpu = std::int64_t{1} << 24;
  const std::int64_t drawn = device == Device::cpu ? count : std::min(count, most_on_gpu);
  Buffer buffer(bytes_of(dtype, drawn));
#pragma omp parallel for schedule(static)
  for (std::int64_t x = 0; x < drawn; ++x) {
    reference::store(buffer.data(), dtype, x, law.mean + law.deviation * reference::normal(seed, stream, x));
  }
  if (device == Device::cpu) return buffer;
  Buffer there(bytes_of(dtype, count), device);
  for (std::size_t at = 0; at < there.size(); at += buffer.size())
    gpu_instruments().copy(there.data() + at, buffer.data(), std::min(buffer.size(), there.size() - at));
  return there;
}

struct Counts {
  std::int64_t qk;
  std::int64_t v;
  std::int64_t gate;
};

Counts counts(const MlstmShape& shape) {
  const std::int64_t rows = shape.batch * shape.tokens;
  return {rows * shape.qk_heads * shape.dqk, rows * shape.heads * shape.dhv, rows * shape.heads};
}

TensorView qk_view(const MlstmShape& s, const Buffer& buffer) {
  return {buffer.data(), s.dtype, {s.batch, s.tokens, s.qk_heads, s.dqk}};
}
MutableTensorView qk_output(const MlstmShape& s, const Buffer& buffer) {
  return {buffer.data(), s.dtype, {s.batch, s.tokens, s.qk_heads, s.dqk}};
}
TensorView v_view(const MlstmShape& s, const Buffer& buffer) {
  return {buffer.data(), s.dtype, {s.batch, s.tokens, s.heads, s.dhv}};
}
MutableTensorView v_output(const MlstmShape& s, const Buffer& buffer) {
  return {buffer.data(), s.dtype, {s.batch, s.tokens, s.heads, s.dhv}};
}
TensorView gate_view(const MlstmShape& s, const Buffer& buffer) {
  return {buffer.data(), s.gate_dtype, {s.batch, s.tokens, s.heads}};
}
MutableTensorView gate_output(const MlstmShape& s, const Buffer& buffer) {
  return {buffer.data(), s.gate_dtype, {s.batch, s.tokens, s.heads}};
}

DType state_dtype(const MlstmShape& shape) { return shape.dtype == DType::float64 ? DType::float64 : DType::float32; }

}  // namespace

void Buffer::Free::operator()(std::byte* memory) const {
  if (device == Device::cuda)
    backend(Device::cuda).release(memory, nullptr);
  else
    std::free(memory);
}

Buffer::Buffer(std::size_t bytes, Device device, Pages pages) : data_(nullptr, Free{device}), bytes_(bytes) {
  if (device == Device::cuda) {
    data_.reset(backend(Device::cuda).allocate(bytes, nullptr));
    return;
  }
  const std::size_t rounded = (bytes / scratch_alignment + 1) * scratch_alignment;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(scratch_alignment, rounded)));
  if (data_ == nullptr) throw std::bad_alloc();
  if (pages == Pages::huge) ask_for_huge_pages(data_.get(), rounded);
  std::memset(data_.get(), 0, rounded);
}

Workload::Workload(const MlstmShape& shape, bool with_backward, Device device)
    : shape_(shape),
      q_(filled(shape.dtype, counts(shape).qk, Stream::q, standard, device)),
      k_(filled(shape.dtype, counts(shape).qk, Stream::k, standard, device)),
      v_(filled(shape.dtype, counts(shape).v, Stream::v, standard, device)),
      i_(filled(shape.gate_dtype, counts(shape).gate, Stream::i, input_gate, device)),
      f_(filled(shape.gate_dtype, counts(shape).gate, Stream::f, forget_gate, device)),
      h_(bytes_of(shape.dtype, counts(shape).v), device),
      dh_(with_backward ? filled(shape.dtype, counts(shape).v, Stream::dh, standard, device) : Buffer(0, device)),
      dq_(with_backward ? q_.size() : 0, device),
      dk_(with_backward ? k_.size() : 0, device),
      dv_(with_backward ? v_.size() : 0, device),
      di_(with_backward ? i_.size() : 0, device),
      df_(with_backward ? f_.size() : 0, device) {}

MlstmForward Workload::forward(const MlstmOptions& options) const {
  return {.q = qk_view(shape_, q_),
          .k = qk_view(shape_, k_),
          .v = v_view(shape_, v_),
          .i = gate_view(shape_, i_),
          .f = gate_view(shape_, f_),
          .h = v_output(shape_, h_),
          .options = options};
}

MlstmBackward Workload::backward(const MlstmOptions& options) const {
  return {.q = qk_view(shape_, q_),
          .k = qk_view(shape_, k_),
          .v = v_view(shape_, v_),
          .i = gate_view(shape_, i_),
          .f = gate_view(shape_, f_),
          .dh = v_view(shape_, dh_),
          .dq = qk_output(shape_, dq_),
          .dk = qk_output(shape_, dk_),
          .dv = v_output(shape_, dv_),
          .di = gate_output(shape_, di_),
          .df = gate_output(shape_, df_),
          .options = options};
}

std::size_t Workload::bytes(bool with_backward) const {
  const std::size_t inputs = q_.size() + k_.size() + v_.size() + i_.size() + f_.size();
  return inputs + h_.size() + (with_backward ? inputs + h_.size() : 0);  // dh and one gradient per input
}

StepWorkload::StepWorkload(const MlstmShape& shape, Device device)
    : shape_(shape),
      q_(filled(shape.dtype, counts(shape).qk, Stream::q, standard, device)),
      k_(filled(shape.dtype, counts(shape).qk, Stream::k, standard, device)),
      v_(filled(shape.dtype, counts(shape).v, Stream::v, standard, device)),
      i_(filled(shape.gate_dtype, counts(shape).gate, Stream::i, input_gate, device)),
      f_(filled(shape.gate_dtype, counts(shape).gate, Stream::f, forget_gate, device)),
      h_(bytes_of(shape.dtype, counts(shape).v), device),
      C_(filled(state_dtype(shape), shape.batch * shape.heads * shape.dqk * shape.dhv, Stream::C0, standard, device)),
      n_(filled(state_dtype(shape), shape.batch * shape.heads * shape.dqk, Stream::n0, standard, device)),
      m_(filled(state_dtype(shape), shape.batch * shape.heads, Stream::m0, standard, device)) {}

MlstmStep StepWorkload::step(const MlstmOptions& options) const {
  const MlstmShape& s = shape_;
  return {.q = qk_view(s, q_),
          .k = qk_view(s, k_),
          .v = v_view(s, v_),
          .i = gate_view(s, i_),
          .f = gate_view(s, f_),
          .h = v_output(s, h_),
          .state = {.C = {C_.data(), state_dtype(s), {s.batch, s.heads, s.dqk, s.dhv}},
                    .n = {n_.data(), state_dtype(s), {s.batch, s.heads, s.dqk}},
                    .m = {m_.data(), state_dtype(s), {s.batch, s.heads}}},
          .options = options};
}

DeltaWorkload::DeltaWorkload(const DeltaShape& shape, Kind kind)
    : shape_(shape),
      q_(filled(shape.dtype, counts(shape).qk, Stream::q, standard, Device::cpu)),
      k_(filled(shape.dtype, counts(shape).qk, Stream::k, standard, Device::cpu)),
      v_(filled(shape.dtype, counts(shape).v, Stream::v, standard, Device::cpu)),
      beta_(filled(shape.gate_dtype, counts(shape).gate, Stream::i, standard, Device::cpu)),
      g_(filled(shape.gate_dtype, counts(shape).gate, Stream::f, log_decay, Device::cpu)),
      h_(bytes_of(shape.dtype, counts(shape).v)),
      dh_(kind == Kind::training ? filled(shape.dtype, counts(shape).v, Stream::dh, standard, Device::cpu) : Buffer(0)),
      dq_(kind == Kind::training ? q_.size() : 0),
      dk_(kind == Kind::training ? k_.size() : 0),
      dv_(kind == Kind::training ? v_.size() : 0),
      dbeta_(kind == Kind::training ? beta_.size() : 0),
      dg_(kind == Kind::training ? g_.size() : 0),
      C_(kind == Kind::step ? filled(state_dtype(shape), shape.batch * shape.heads * shape.dqk * shape.dhv, Stream::C0,
                                     standard, Device::cpu)
                            : Buffer(0)) {}

DeltaForward DeltaWorkload::forward(std::int64_t chunk_size) const {
  return {.q = qk_view(shape_, q_),
          .k = qk_view(shape_, k_),
          .v = v_view(shape_, v_),
          .beta = gate_view(shape_, beta_),
          .g = gate_view(shape_, g_),
          .h = v_output(shape_, h_),
          .options = {.write = WriteGate::sigmoid, .normalize_qk = true, .chunk_size = chunk_size}};
}

DeltaBackward DeltaWorkload::backward(std::int64_t chunk_size) const {
  return {.q = qk_view(shape_, q_),
          .k = qk_view(shape_, k_),
          .v = v_view(shape_, v_),
          .beta = gate_view(shape_, beta_),
          .g = gate_view(shape_, g_),
          .dh = v_view(shape_, dh_),
          .dq = qk_output(shape_, dq_),
          .dk = qk_output(shape_, dk_),
          .dv = v_output(shape_, dv_),
          .dbeta = gate_output(shape_, dbeta_),
          .dg = gate_output(shape_, dg_),
          .options = forward(chunk_size).options};
}

DeltaStep DeltaWorkload::step() const {
  const DeltaShape& s = shape_;
  return {.q = qk_view(s, q_),
          .k = qk_view(s, k_),
          .v = v_view(s, v_),
          .beta = gate_view(s, beta_),
          .g = gate_view(s, g_),
          .h = v_output(s, h_),
          .state = {C_.data(), state_dtype(s), {s.batch, s.heads, s.dqk, s.dhv}},
          .options = forward(0).options};
}

}  // namespace tfla::cli
