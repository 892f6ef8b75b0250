#include "cpu/formulations/recurrent.h"

#include <algorithm>

#include "cpu/threads.h"

namespace tfla::cpu {

template <class Real>
void run_recurrent(const Problem& problem, const ForwardOutputs& outputs, const StepScratch<Real>& scratch) {
  const Plan& plan = problem.plan;
  const MutableMlstmState& last_state = outputs.last_state;
  const std::int64_t heads = problem.heads();
  const std::int64_t count = step_panels(plan);
  // A panel of the state in the worker's memory, from the initial state or zero.
  const auto start = [&](const Sequence& sequence, std::int64_t head, Columns columns, Real* memory) {
    State<Real> state{dense(memory, plan.shape.dqk, columns.width), memory + plan.shape.dqk * columns.width, true};
    load_state(problem.initial_state.C, problem.initial_state.n, sequence.index, head, columns, state);
    if (state.zero) std::fill_n(memory, plan.shape.dqk * (columns.width + 1), Real{0});
    state.zero = false;
    return state;
  };
  parallel_for(plan.shape.sequences * heads, plan.threads, [&](std::int64_t unit, int index) {
    const auto worker = scratch.workers.at(plan, index);
    const Sequence sequence = problem.sequence(unit / heads);
    const std::int64_t head = unit % heads;
    const State<Real> state = start(sequence, head, {0, 0}, worker.state);
    const double m = initial_max(problem, sequence, head);
    scratch.m_last[unit] = token_gates(problem, sequence, head, m, state.n, scratch, worker);
    store_state(state, MutableTensorView{}, last_state.n, sequence.index, head);
  });
  parallel_for(plan.shape.sequences * heads * count, plan.threads, [&](std::int64_t unit, int index) {
    const auto worker = scratch.workers.at(plan, index);
    const Sequence sequence = problem.sequence(unit / (heads * count));
    const std::int64_t head = unit / count % heads;
    const Columns columns = step_columns(plan, unit % count);
    const State<Real> state = start(sequence, head, columns, worker.state);
    token_outputs(problem, sequence, head, columns, state.C, scratch, worker, outputs.h);
    MutableTensorView C = last_state.C;
    if (C.given()) C.data = static_cast<Real*>(C.data) + columns.first;
    store_state(state, C, MutableTensorView{}, sequence.index, head);
  });
  store_max_states<Real>(problem, scratch.m_last, last_state.m);
}

template void run_recurrent(const Problem&, const ForwardOutputs&, const StepScratch<float>&);
template void run_recurrent(const Problem&, const ForwardOutputs&, const StepScratch<double>&);

}  // namespace tfla::cpu
