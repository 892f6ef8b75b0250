#include "cpu/ssd/step.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/decay.h"
#include "core/time_step.h"
#include "cpu/gate_tensor.h"
#include "cpu/kernels/simd.h"
#include "cpu/padding.h"
#include "cpu/threads.h"
#include "cpu/tile.h"

namespace tfla::cpu::ssd {

namespace {

template <class View>
auto* address(const View& view, std::int64_t offset) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, const std::byte, std::byte>;
  return static_cast<Byte*>(view.data) + offset * item_size(view.dtype);
}

// Elements [first, first + count) of the row (batch, token, head) of a [B,T,H,D] tensor.
template <class Real>
void load_row(const TensorView& view, std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t first,
              std::int64_t count, Real* to) {
  const std::int64_t at = batch * view.strides[0] + token * view.strides[1] + head * view.strides[2] + first;
  simd::load(address(view, at), view.dtype, to, count);
}

// What a token does to the state of one head.
template <class Real>
struct TokenStep {
  Decay<Real> decay;
  Real weight;
};

template <class Real>
TokenStep<Real> token_step(const SsdStep& args, std::int64_t batch, std::int64_t token, std::int64_t head) {
  const auto of_head = [&](const TensorView& view) { return read_gate(view, head * view.strides[0]); };
  const TimeStepRule<double> rule{args.options.dt_softplus, args.options.dt_min, args.options.dt_max};
  const TensorView& dt = args.dt;
  const double raw = read_gate(dt, batch * dt.strides[0] + token * dt.strides[1] + head * dt.strides[2]);
  const double step = rule.value(raw + (args.dt_bias.given() ? of_head(args.dt_bias) : 0.0));
  const double log_decay = of_head(args.A) * step;
  const bool near_one = std::abs(log_decay) <= Decay<Real>::near_one;
  const double rest = near_one ? std::expm1(log_decay) : std::exp(log_decay);
  return {{near_one ? Real{1} : Real{0}, static_cast<Real>(rest)}, static_cast<Real>(step)};
}

// Rows [first, first + rows) of a head's state take one token; y of these rows, before the epilogue.
template <class Real>
void update_rows(const SsdStep& args, const TokenStep<Real>& step, std::int64_t state_offset, std::int64_t rows,
                 const typename StepScratch<Real>::Worker& worker) {
  const MutableTensorView& state = args.state;
  const std::int64_t dims = state.shape[3];
  for (std::int64_t p = 0; p < rows; ++p) {
    auto* row = address(state, state_offset + p * state.strides[2]);
    const Real weight = step.weight * worker.x[p];
    if (state.dtype == native<Real>) {
      worker.y[p] =
          simd::step_row(step.decay, weight, worker.B, worker.C, static_cast<Real*>(static_cast<void*>(row)), dims);
    } else {
      simd::load(row, state.dtype, worker.S, dims);
      worker.y[p] = simd::step_row(step.decay, weight, worker.B, worker.C, worker.S, dims);
      simd::store(Real{1}, worker.S, row, state.dtype, dims);
    }
  }
}

template <class Real>
void store_outputs(const SsdStep& args, std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t first,
                   std::int64_t rows, const typename StepScratch<Real>::Worker& worker) {
  if (args.D.given()) {
    const std::int64_t step = args.D.rank == 2 ? args.D.strides[1] : 0;
    for (std::int64_t p = 0; p < rows; ++p) {
      worker.y[p] += static_cast<Real>(read_gate(args.D, head * args.D.strides[0] + (first + p) * step)) * worker.x[p];
    }
  }
  if (args.z.given()) {
    load_row(args.z, batch, token, head, first, rows, worker.z);
    simd::silu(worker.z, rows);
    simd::multiply(worker.z, worker.y, rows);
  }
  const MutableTensorView& y = args.y;
  const std::int64_t at = batch * y.strides[0] + token * y.strides[1] + head * y.strides[2] + first;
  simd::store(Real{1}, worker.y, address(y, at), y.dtype, rows);
}

}  // namespace

template <class Real>
StepScratch<Real>::Worker::Worker(Arena& arena, const SsdPlan& plan) {
  for (Real** row : {&B, &C, &S}) *row = arena.take<Real>(plan.scan.shape.dqk);
  for (Real** row : {&x, &y, &z}) *row = arena.take<Real>(plan.panel);
}

template <class Real>
StepScratch<Real>::StepScratch(Arena& arena, const SsdPlan& plan) {
  workers = Workers<Worker>(arena, plan);
}

template <class Real>
void run_step(const SsdStep& args, const SsdPlan& plan, const StepScratch<Real>& scratch) {
  const MlstmShape& shape = plan.scan.shape;
  const std::int64_t panels = (shape.dhv + plan.panel - 1) / plan.panel, group = shape.heads / shape.qk_heads;
  const std::int64_t per_row = shape.heads * panels;
  parallel_for(shape.batch * per_row, plan.threads, [&](std::int64_t unit, int index) {
    const std::int64_t batch = unit / per_row, head = unit / panels % shape.heads, first = unit % panels * plan.panel;
    const std::int64_t slot = args.slots.given() ? read_index(args.slots, batch) : batch;
    if (slot == padding_slot) {
      if (head == 0 && first == 0) clear_tokens(args.y, batch, 0, shape.tokens);
      return;
    }
    const std::int64_t rows = std::min(plan.panel, shape.dhv - first);
    const MutableTensorView& state = args.state;
    const std::int64_t offset = slot * state.strides[0] + head * state.strides[1] + first * state.strides[2];
    const auto worker = scratch.workers.at(plan, index);
    for (std::int64_t t = 0; t < shape.tokens; ++t) {
      load_row(args.B, batch, t, head / group, 0, shape.dqk, worker.B);
      load_row(args.C, batch, t, head / group, 0, shape.dqk, worker.C);
      load_row(args.x, batch, t, head, first, rows, worker.x);
      update_rows<Real>(args, token_step<Real>(args, batch, t, head), offset, rows, worker);
      store_outputs<Real>(args, batch, t, head, first, rows, worker);
    }
  });
}

#define TFLA_INSTANTIATE(Real)       \
  template struct StepScratch<Real>; \
  template void run_step(const SsdStep&, const SsdPlan&, const StepScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu::ssd
