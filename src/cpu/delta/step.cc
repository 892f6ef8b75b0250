#include "cpu/delta/step.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "cpu/kernels/simd.h"
#include "cpu/padding.h"
#include "cpu/threads.h"

namespace tfla::cpu::delta {

namespace {

template <class Real>
void load_row(const Problem& problem, const TensorView& view, const Sequence& sequence, std::int64_t token,
              std::int64_t head, double scale, Real* to) {
  const std::int64_t dqk = problem.plan.shape.dqk;
  simd::load(row_of(view, sequence, token, head / problem.group()), view.dtype, to, dqk);
  const Real norm = problem.plan.options.normalize_qk ? inverse_norm(to, dqk) : Real{1};
  simd::scale(static_cast<Real>(scale) * norm, to, to, dqk);
}

template <class Real>
Decay<Real> decay_of(double log_decay) {
  if (std::abs(log_decay) > Decay<Real>::near_one) return {Real{0}, static_cast<Real>(std::exp(log_decay))};
  return {Real{1}, static_cast<Real>(std::expm1(log_decay))};
}

// All tokens of a row of the batch on some columns of one head's state.
template <class Real>
void step_columns(const Problem& problem, const Sequence& sequence, std::int64_t head, Columns columns, Real* C,
                  std::int64_t stride, const typename StepScratch<Real>::Worker& worker, const MutableTensorView& h) {
  const std::int64_t dqk = problem.plan.shape.dqk, width = columns.width;
  for (std::int64_t t = 0; t < sequence.length; ++t) {
    load_row(problem, problem.q, sequence, t, head, problem.scale(), worker.q);
    load_row(problem, problem.k, sequence, t, head, 1, worker.k);
    const auto* value = static_cast<const std::byte*>(row_of(problem.v, sequence, t, head));
    simd::load(value + columns.first * item_size(problem.v.dtype), problem.v.dtype, worker.value, width);
    const Decay<Real> decay = decay_of<Real>(log_decay(problem, sequence, t, head));
    simd::weighted_rows(worker.k, C, stride, worker.recalled, dqk, width);
    simd::add(-(decay.whole + decay.rest), worker.recalled, worker.value, width);
    simd::scale(static_cast<Real>(write_strength(problem, sequence, t, head)), worker.value, worker.value, width);
    simd::step_panel(decay, worker.k, worker.q, worker.value, C, stride, worker.h, dqk, width);
    auto* out = static_cast<std::byte*>(row_of(h, sequence, t, head)) + columns.first * item_size(h.dtype);
    simd::store(Real{1}, worker.h, out, h.dtype, width);
  }
}

}  // namespace

template <class Real>
StepScratch<Real>::Worker::Worker(Arena& arena, const DeltaPlan& plan) {
  for (Real** row : {&q, &k}) *row = arena.take<Real>(plan.shape.dqk);
  for (Real** row : {&value, &recalled, &h}) *row = arena.take<Real>(plan.panel);
}

template <class Real>
void run_step(const Problem& problem, const MutableTensorView& h, const MutableTensorView& state,
              const TensorView& slots, const StepScratch<Real>& scratch) {
  const DeltaPlan& plan = problem.plan;
  const std::int64_t dhv = plan.shape.dhv, panels = (dhv + plan.panel - 1) / plan.panel;
  const std::int64_t per_row = plan.shape.heads * panels;
  parallel_for(plan.shape.batch * per_row, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / per_row);
    const std::int64_t head = unit / panels % plan.shape.heads, first = unit % panels * plan.panel;
    const std::int64_t slot = slots.given() ? read_index(slots, sequence.index) : sequence.index;
    if (slot == padding_slot) {
      if (head == 0 && first == 0) clear_tokens(h, sequence.batch, 0, sequence.length);
      return;
    }
    auto* C = static_cast<Real*>(state.data) + slot * state.strides[0] + head * state.strides[1] + first;
    step_columns<Real>(problem, sequence, head, {first, std::min(plan.panel, dhv - first)}, C, state.strides[2],
                       scratch.workers.at(plan, index), h);
  });
}

#define TFLA_INSTANTIATE(Real)                                                                                  \
  template struct StepScratch<Real>;                                                                            \
  template void run_step(const Problem&, const MutableTensorView&, const MutableTensorView&, const TensorView&, \
                         const StepScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu::delta
