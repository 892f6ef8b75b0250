#include "cpu/formulations/parallel.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels/simd.h"
#include "cpu/threads.h"

namespace tfla::cpu {

namespace {

template <class Real>
using Worker = typename ParallelScratch<Real>::Worker;

// The plan as the buffers of one block see it.
Plan block_plan(const Plan& plan) {
  Plan block = plan;
  block.tile = std::min(parallel_block, plan.tile);
  return block;
}

template <class Real>
void block_outputs(const Problem& problem, const Tile& rows, const ParallelScratch<Real>& scratch,
                   const Worker<Real>& worker, const MutableTensorView& h) {
  const MlstmShape& shape = problem.plan.shape;
  const GradientBuffers<Real>& buffers = worker.block;
  const std::int64_t qk_head = rows.head / problem.group();
  const auto scale = static_cast<Real>(problem.settings.scale);
  const GateVectors<Real> gates = scratch.gates.at(problem, rows.sequence, rows.head);
  const Matrix<const Real> Q = load_tile(problem.q, rows, qk_head, buffers.q, 0, shape.dqk);
  const Matrix<Real> H = dense(buffers.dv, rows.size(), shape.dhv);

  State<Real> state = state_in(worker.state, shape, all_columns(shape));
  load_state(problem.initial_state.C, problem.initial_state.n, rows.sequence.index, rows.head, all_columns(shape),
             state);
  if (!state.zero) {
    const Matrix<Real> Qb = dense(buffers.qb, rows.size(), shape.dqk);
    scale_rows(scale, gates.qbar + rows.begin, Q, Qb);
    product(H, Qb, state.C, Real{0});
  }
  for (std::int64_t begin = 0; begin < rows.end; begin += parallel_block) {
    const Tile columns{rows.sequence, rows.head, begin, std::min(begin + parallel_block, rows.end)};
    const Matrix<const Real> K = load_tile(problem.k, columns, qk_head, buffers.operands.k, 0, shape.dqk);
    const Matrix<const Real> V = load_tile(problem.v, columns, rows.head, buffers.operands.v, 0, shape.dhv);
    const Matrix<Real> D = dense(buffers.D, rows.size(), columns.size());
    const Matrix<Real> S = dense(buffers.S, rows.size(), columns.size());
    const BlockPair pair{rows, columns};
    gate_square(gates, scale, pair, worker.weights, D);
    gated_scores<Real>(pair.square(), Q, K, D, S);
    product(H, S, V, state.zero && begin == 0 ? Real{0} : Real{1});
  }
  store_tile<Real>(H, gates.inverse + rows.begin, h, rows, rows.head);
}

// C = gbar C_0 + (abar K)^T V over the whole sequence.
template <class Real>
void last_state(const Problem& problem, const Sequence& sequence, std::int64_t head,
                const ParallelScratch<Real>& scratch, const Worker<Real>& worker, const MutableMlstmState& out) {
  const MlstmShape& shape = problem.plan.shape;
  const StateBuffers<Real>& buffers = worker.block.operands;
  const GateVectors<Real> gates = scratch.gates.at(problem, sequence, head);
  State<Real> state = state_in(worker.state, shape, all_columns(shape));
  load_state(problem.initial_state.C, problem.initial_state.n, sequence.index, head, all_columns(shape), state);
  for (std::int64_t begin = 0; begin < sequence.length; begin += parallel_block) {
    const Tile tile{sequence, head, begin, std::min(begin + parallel_block, sequence.length)};
    const Matrix<const Real> K = load_tile(problem.k, tile, head / problem.group(), buffers.k, 0, shape.dqk);
    const Matrix<const Real> V = load_tile(problem.v, tile, head, buffers.v, 0, shape.dhv);
    const Matrix<Real> Kb = dense(buffers.kb, tile.size(), shape.dqk);
    const Real decay = begin == 0 ? gates.qbar[sequence.length - 1] : Real{1};
    scale_rows<Real>(1, gates.abar + begin, K, Kb);
    advance_matrix<Real>(decay, Kb, V, state, state);
    advance_vector<Real>(decay, Kb, nullptr, state, state);
    state.zero = false;
  }
  store_state(state, out.C, out.n, sequence.index, head);
}

}  // namespace

template <class Real>
void gate_square(const GateVectors<Real>& gates, Real scale, const BlockPair& pair, Real* weights,
                 const Matrix<Real>& D) {
  GateVectors<Real> view = gates;
  view.u += pair.rows.begin;
  view.c += pair.columns.begin;
  if (pair.square() == Square::diagonal) {
    gate_matrix(view, scale, D);
    return;
  }
  double highest = view.c[0];
  for (std::int64_t j = 1; j < D.cols; ++j) highest = std::max(highest, view.c[j]);
  if (std::isinf(highest) && highest < 0) highest = 0;  // every input gate of the block is closed
  simd::exp_shifted(scale, highest, view.u, weights, D.rows);
  // The last row holds the factors of the columns until its turn comes.
  Real* factors = D.row(D.rows - 1);
  simd::exp_shifted(Real{1}, -highest, view.c, factors, D.cols);
  for (std::int64_t t = 0; t < D.rows; ++t) simd::scale(weights[t], factors, D.row(t), D.cols);
}

template <class Real>
ParallelScratch<Real>::Worker::Worker(Arena& arena, const Plan& plan) : block(arena, block_plan(plan)) {
  state = arena.take<Real>(state_size(plan.shape));
  dstate = arena.take<Real>(state_size(plan.shape));
  weights = arena.take<Real>(parallel_block);
  norm = NormBuffers<Real>(arena, plan);
}

template <class Real>
ParallelScratch<Real>::ParallelScratch(Arena& arena, const Plan& plan) : gates(arena, plan) {
  if (plan.operation == Operation::backward) {
    const std::int64_t count = plan.shape.batch * plan.shape.tokens * plan.shape.heads;
    deta = arena.take<Real>(count);
    for (double** vector : {&row, &column, &inflow, &outflow}) *vector = arena.take<double>(count);
  }
  workers = Workers<Worker>(arena, plan);
}

template <class Real>
void run_parallel_forward(const Problem& problem, const ForwardOutputs& outputs, const ParallelScratch<Real>& scratch) {
  const Plan& plan = problem.plan;
  const std::int64_t heads = problem.heads();
  const std::int64_t blocks = blocks_of(plan.shape.longest);
  parallel_for(plan.shape.sequences * heads, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / heads);
    gates_and_denominators(problem, scratch.gates, sequence, unit % heads, scratch.workers.at(plan, index).norm);
  });
  parallel_for(plan.shape.sequences * heads * blocks, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / (heads * blocks));
    const std::int64_t begin = unit % blocks * parallel_block;
    if (begin >= sequence.length) return;
    const Tile rows{sequence, unit / blocks % heads, begin, std::min(begin + parallel_block, sequence.length)};
    block_outputs(problem, rows, scratch, scratch.workers.at(plan, index), outputs.h);
  });
  if (!outputs.last_state.C.given()) return;
  parallel_for(plan.shape.sequences * heads, plan.threads, [&](std::int64_t unit, int index) {
    last_state(problem, problem.sequence(unit / heads), unit % heads, scratch, scratch.workers.at(plan, index),
               outputs.last_state);
  });
  store_max_states<Real>(problem, scratch.gates.m_last, outputs.last_state.m);
}

#define TFLA_INSTANTIATE(Real)                                                                             \
  template void gate_square(const GateVectors<Real>&, Real, const BlockPair&, Real*, const Matrix<Real>&); \
  template struct ParallelScratch<Real>;                                                                   \
  template void run_parallel_forward(const Problem&, const ForwardOutputs&, const ParallelScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
