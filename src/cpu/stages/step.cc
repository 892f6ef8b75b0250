#include "cpu/stages/step.h"

#include <cmath>

#include "cpu/kernels/simd.h"
#include "cpu/padding.h"
#include "cpu/threads.h"

namespace tfla::cpu {

namespace {

// One token's query and key as the state sees them.
template <class Real>
void load_token(const Problem& problem, const Sequence& sequence, std::int64_t token, std::int64_t head, Real weight,
                const typename StepScratch<Real>::Worker& worker) {
  const std::int64_t dqk = problem.plan.shape.dqk;
  const std::int64_t qk_head = head / problem.group();
  simd::load(row_of(problem.q, sequence, token, qk_head), problem.q.dtype, worker.q, dqk);
  simd::load(row_of(problem.k, sequence, token, qk_head), problem.k.dtype, worker.input, dqk);
  simd::scale(static_cast<Real>(problem.settings.scale), worker.q, worker.q, dqk);
  simd::scale(weight, worker.input, worker.input, dqk);
}

}  // namespace

template <class Real>
TokenGates<Real>::TokenGates(Arena& arena, const Plan& plan) {
  const std::int64_t count = plan.shape.batch * plan.shape.tokens * plan.shape.heads;
  for (double** vector : {&log_f, &log_i}) *vector = arena.take<double>(count);
  decay = arena.take<Decay<Real>>(count);
  for (Real** vector : {&weight, &inverse}) *vector = arena.take<Real>(count);
}

template <class Real>
StepScratch<Real>::Worker::Worker(Arena& arena, const Plan& plan) {
  q = arena.take<Real>(plan.shape.dqk);
  input = arena.take<Real>(plan.shape.dqk);
  n = arena.take<double>(plan.shape.dqk);
  v = arena.take<Real>(plan.panel);
  h = arena.take<Real>(plan.panel);
  if (plan.operation != Operation::step) state = arena.take<Real>(plan.shape.dqk * (plan.panel + 1));
}

template <class Real>
StepScratch<Real>::StepScratch(Arena& arena, const Plan& plan) : gates(arena, plan) {
  m_last = arena.take<double>(plan.shape.sequences * plan.shape.heads);
  workers = Workers<Worker>(arena, plan);
}

template <class Real>
double token_gates(const Problem& problem, const Sequence& sequence, std::int64_t head, double m, Real* n,
                   const StepScratch<Real>& scratch, const typename StepScratch<Real>::Worker& worker) {
  const Settings& settings = problem.settings;
  const TokenGates<Real>& gates = scratch.gates;
  const std::int64_t dqk = problem.plan.shape.dqk;
  const std::int64_t offset = head * problem.tokens() + sequence.packed;
  log_gates(problem, sequence, head, m, gates.log_f + offset, gates.log_i + offset);
  std::copy_n(n, dqk, worker.n);
  for (std::int64_t t = 0; t < sequence.length; ++t) {
    const double log_f = gates.log_f[offset + t];
    const double log_i = gates.log_i[offset + t];
    // Rounded to the type of the stored m, as in the gate scan.
    const double next =
        settings.family.has_max_state ? static_cast<double>(static_cast<Real>(std::max(log_f + m, log_i))) : 0.0;
    const double log_decay = log_f + m - next;
    const bool near_one = std::abs(log_decay) <= Decay<Real>::near_one;
    const double rest = near_one ? std::expm1(log_decay) : std::exp(log_decay);
    const double weight = std::exp(log_i - next);
    m = next;
    load_token(problem, sequence, t, head, Real{1}, worker);
    const double decay = near_one ? 1 + rest : rest;
    const Real* k = worker.input;
    const Real* q = worker.q;
    double qn = 0;
    simd::step_vector(1, &decay, &weight, &k, &q, worker.n, dqk, &qn);
    gates.decay[offset + t] = {near_one ? Real{1} : Real{0}, static_cast<Real>(rest)};
    gates.weight[offset + t] = static_cast<Real>(weight);
    gates.inverse[offset + t] = static_cast<Real>(denominator(settings, qn, m).inverse);
  }
  for (std::int64_t r = 0; r < dqk; ++r) n[r] = static_cast<Real>(worker.n[r]);
  return m;
}

template <class Real>
void token_outputs(const Problem& problem, const Sequence& sequence, std::int64_t head, Columns columns,
                   const Matrix<Real>& C, const StepScratch<Real>& scratch,
                   const typename StepScratch<Real>::Worker& worker, const MutableTensorView& h) {
  const TokenGates<Real>& gates = scratch.gates;
  const std::int64_t offset = head * problem.tokens() + sequence.packed;
  const std::int64_t skip = columns.first * item_size(problem.v.dtype);
  for (std::int64_t t = 0; t < sequence.length; ++t) {
    const auto* v = static_cast<const std::byte*>(row_of(problem.v, sequence, t, head)) + skip;
    simd::load(v, problem.v.dtype, worker.v, columns.width);
    load_token(problem, sequence, t, head, gates.weight[offset + t], worker);
    simd::step_panel(gates.decay[offset + t], worker.input, worker.q, worker.v, C.data, C.stride, worker.h, C.rows,
                     C.cols);
    auto* out = static_cast<std::byte*>(row_of(h, sequence, t, head)) + skip;
    simd::store(gates.inverse[offset + t], worker.h, out, h.dtype, columns.width);
  }
}

template <class Real>
void run_step(const Problem& problem, const MutableTensorView& h, const MutableMlstmState& state,
              const TensorView& slots, const StepScratch<Real>& scratch) {
  const Plan& plan = problem.plan;
  const std::int64_t heads = problem.heads();
  const auto slot_of = [&](std::int64_t row) { return slots.given() ? read_index(slots, row) : row; };
  for (std::int64_t row = 0; slots.given() && row < plan.shape.batch; ++row)
    if (slot_of(row) == padding_slot) clear_tokens(h, row, 0, plan.shape.tokens);
  parallel_for(plan.shape.batch * heads, plan.threads, [&](std::int64_t unit, int index) {
    const std::int64_t head = unit % heads;
    const std::int64_t slot = slot_of(unit / heads);
    if (slot == padding_slot) return;
    Real* n = static_cast<Real*>(state.n.data) + slot * state.n.strides[0] + head * state.n.strides[1];
    Real& m = static_cast<Real*>(state.m.data)[slot * state.m.strides[0] + head * state.m.strides[1]];
    m = static_cast<Real>(token_gates(problem, problem.sequence(unit / heads), head,
                                      finite_max_state(static_cast<double>(m)), n, scratch,
                                      scratch.workers.at(plan, index)));
  });
  const std::int64_t count = step_panels(plan);
  parallel_for(plan.shape.batch * heads * count, plan.threads, [&](std::int64_t unit, int index) {
    const std::int64_t row = unit / (heads * count);
    const std::int64_t head = unit / count % heads;
    const Columns columns = step_columns(plan, unit % count);
    const std::int64_t slot = slot_of(row);
    if (slot == padding_slot) return;
    Real* C = static_cast<Real*>(state.C.data) + slot * state.C.strides[0] + head * state.C.strides[1];
    const Matrix<Real> panel{C + columns.first, plan.shape.dqk, columns.width, state.C.strides[2]};
    token_outputs(problem, problem.sequence(row), head, columns, panel, scratch, scratch.workers.at(plan, index), h);
  });
}

#define TFLA_INSTANTIATE(Real)                                                                                        \
  template struct TokenGates<Real>;                                                                                   \
  template struct StepScratch<Real>;                                                                                  \
  template double token_gates(const Problem&, const Sequence&, std::int64_t, double, Real*, const StepScratch<Real>&, \
                              const StepScratch<Real>::Worker&);                                                      \
  template void token_outputs(const Problem&, const Sequence&, std::int64_t, Columns, const Matrix<Real>&,            \
                              const StepScratch<Real>&, const StepScratch<Real>::Worker&, const MutableTensorView&);  \
  template void run_step(const Problem&, const MutableTensorView&, const MutableMlstmState&, const TensorView&,       \
                         const StepScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
