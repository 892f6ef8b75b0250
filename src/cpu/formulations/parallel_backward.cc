// Backward of the parallel formulation, by the paper's split: one pass over rows for dQ, one over columns for dK and
// dV. Both passes form the same squares S and dS bit for bit, so their row and column sums telescope exactly in dlogf.
#include <algorithm>

#include "cpu/formulations/parallel.h"
#include "cpu/kernels/simd.h"
#include "cpu/threads.h"

namespace tfla::cpu {

namespace {

template <class Real>
class ParallelGradients {
 public:
  using Scratch = ParallelScratch<Real>;

  ParallelGradients(const Problem& problem, const BackwardTensors& tensors, const Scratch& scratch,
                    const typename Scratch::Worker& worker, const Sequence& sequence)
      : problem_(problem),
        shape_(problem.plan.shape),
        tensors_(tensors),
        scratch_(scratch),
        worker_(worker),
        buffers_(worker.block),
        sequence_(sequence),
        scale_(static_cast<Real>(problem.settings.scale)) {}

  // deta of a block of rows, for the exact normalizer gradient.
  void make_deta(std::int64_t head, std::int64_t begin) const {
    const Tile rows = block(head, begin);
    const GateVectors<Real> gates = gates_of(head);
    const State<Real> state = initial_state(head);
    const Matrix<const Real> Q = queries(rows);
    const Matrix<Real> dHt = output_gradients(rows);
    double* dh_h = buffers_.row;
    std::fill_n(dh_h, rows.size(), 0.0);
    for (std::int64_t column = 0; column <= begin; column += parallel_block) {
      const BlockPair pair{rows, block(head, column)};
      const Matrix<Real> S = scores(pair, gates, Q);
      const Matrix<Real> dS = dense(buffers_.dS, S.rows, S.cols);
      product(dS, dHt, values(pair.columns).t(), Real{0});
      for (std::int64_t t = 0; t < S.rows; ++t) {
        dh_h[t] += simd::dot(S.row(t), dS.row(t), visible(pair.square(), t, S.cols));
      }
    }
    if (!state.zero) {
      const Matrix<Real> Qb = weighted_queries(rows, gates, Q);
      const Matrix<Real> through = dense(buffers_.dq, rows.size(), shape_.dqk);
      product(through, dHt, Matrix<const Real>(state.C).t(), Real{0});
      for (std::int64_t t = 0; t < rows.size(); ++t) dh_h[t] += simd::dot(Qb.row(t), through.row(t), shape_.dqk);
    }
    Real* deta = scratch_.deta + offset(head, begin);
    for (std::int64_t t = 0; t < rows.size(); ++t) deta[t] = gates.slope[begin + t] * static_cast<Real>(dh_h[t]);
  }

  // dQ of a block of rows, summed over the heads that share the query, and what dlogf needs of the rows.
  void row_gradients(std::int64_t qk_head, std::int64_t begin) const {
    const Matrix<Real> total = dense(buffers_.qb, block(0, begin).size(), shape_.dqk);
    for (std::int64_t member = 0; member < problem_.group(); ++member) {
      const std::int64_t head = qk_head * problem_.group() + member;
      const Tile rows = block(head, begin);
      const GateVectors<Real> gates = gates_of(head);
      const State<Real> state = initial_state(head);
      const Matrix<const Real> Q = queries(rows);
      const Matrix<Real> dHt = output_gradients(rows);
      const Matrix<Real> dQ = dense(buffers_.dq, rows.size(), shape_.dqk);
      const Real* deta = scratch_.deta + offset(head, begin);
      double* row = scratch_.row + offset(head, begin);
      double* inflow = scratch_.inflow + offset(head, begin);
      std::fill_n(row, rows.size(), 0.0);
      std::fill_n(inflow, rows.size(), 0.0);
      if (!state.zero) {
        product(dQ, dHt, Matrix<const Real>(state.C).t(), Real{0});
        for (std::int64_t t = 0; t < rows.size(); ++t) {
          if (problem_.settings.exact) simd::add(deta[t], state.n, dQ.row(t), shape_.dqk);
          simd::scale(scale_ * gates.qbar[begin + t], dQ.row(t), dQ.row(t), shape_.dqk);
          inflow[t] = simd::dot(Q.row(t), dQ.row(t), shape_.dqk);
        }
      }
      for (std::int64_t column = 0; column <= begin; column += parallel_block) {
        const BlockPair pair{rows, block(head, column)};
        const Matrix<Real> S = scores(pair, gates, Q);
        const Matrix<Real> dS = score_gradients(pair, dHt, values(pair.columns), deta);
        std::fill_n(buffers_.column, S.cols, 0.0);
        gate_scores(pair, S, dS, row, buffers_.column);
        product(dQ, dS, keys(pair.columns), state.zero && column == 0 ? Real{0} : Real{1});
      }
      accumulate(dQ, total, member);
    }
    store_tile<Real>(total, nullptr, tensors_.dq, block(0, begin), qk_head);
  }

  // dV of a block of columns, its dK summed over the heads that share the key, and what dlogi and dlogf need of them.
  void column_gradients(std::int64_t qk_head, std::int64_t begin) const {
    const Matrix<Real> total = dense(buffers_.qb, block(0, begin).size(), shape_.dqk);
    for (std::int64_t member = 0; member < problem_.group(); ++member) {
      const std::int64_t head = qk_head * problem_.group() + member;
      const Tile columns = block(head, begin);
      const GateVectors<Real> gates = gates_of(head);
      const State<Real> dstate = last_gradient(head);
      const Matrix<const Real> V = values(columns);
      const Matrix<Real> dK = dense(buffers_.dk, columns.size(), shape_.dqk);
      const Matrix<Real> dV = dense(buffers_.dv, columns.size(), shape_.dhv);
      double* column = scratch_.column + offset(head, begin);
      double* outflow = scratch_.outflow + offset(head, begin);
      std::fill_n(column, columns.size(), 0.0);
      std::fill_n(outflow, columns.size(), 0.0);
      if (!dstate.zero) {
        const Matrix<Real> Kb = dense(buffers_.operands.kb, columns.size(), shape_.dqk);
        gradients_through_state(keys(columns), V, gates.abar + begin, dstate, Kb, dK, dV, outflow);
      }
      for (std::int64_t row = begin; row < sequence_.length; row += parallel_block) {
        const BlockPair pair{block(head, row), columns};
        const Matrix<const Real> Q = queries(pair.rows);
        const Matrix<Real> dHt = output_gradients(pair.rows);
        const Matrix<Real> S = scores(pair, gates, Q);
        const Matrix<Real> dS = score_gradients(pair, dHt, V, scratch_.deta + offset(head, row));
        std::fill_n(buffers_.row, S.rows, 0.0);
        gate_scores(pair, S, dS, buffers_.row, column);
        const Real beta = dstate.zero && row == begin ? Real{0} : Real{1};
        product(dK, Matrix<const Real>(dS).t(), Q, beta);
        product(dV, Matrix<const Real>(S).t(), dHt, beta);
      }
      store_tile<Real>(dV, nullptr, tensors_.dv, columns, head);
      accumulate(dK, total, member);
    }
    store_tile<Real>(total, nullptr, tensors_.dk, block(0, begin), qk_head);
  }

  // Gate gradients of a whole sequence, and the gradient of the initial state.
  void finish(std::int64_t head) const {
    const GateVectors<Real> gates = gates_of(head);
    const State<Real> state = initial_state(head);
    State<Real> dstate = last_gradient(head);
    const std::int64_t length = sequence_.length;
    const Real decay = length == 0 ? Real{1} : gates.qbar[length - 1];
    const double through = state.zero || dstate.zero ? 0.0 : static_cast<double>(decay) * inner_product(state, dstate);
    const std::int64_t at = offset(head, 0);
    // Gate rows are no longer needed: u and c take the gradients of log f and log i.
    gate_gradients({.row = scratch_.row + at,
                    .column = scratch_.column + at,
                    .inflow = scratch_.inflow + at,
                    .outflow = scratch_.outflow + at},
                   through, length, gates.c, gates.u);
    store_gate_gradients(problem_, sequence_, head, 0, length, gates.c, gates.u, tensors_.di, tensors_.df);
    if (!tensors_.dinitial_state.C.given() && !tensors_.dinitial_state.n.given()) return;
    for (std::int64_t begin = 0; begin < length; begin += parallel_block) {
      const Tile rows = block(head, begin);
      const Matrix<Real> Qb = weighted_queries(rows, gates, queries(rows));
      const Real* deta = problem_.settings.exact ? scratch_.deta + offset(head, begin) : nullptr;
      retreat<Real>(begin == 0 ? decay : Real{1}, Qb, output_gradients(rows), deta, dstate);
    }
    store_state(dstate, tensors_.dinitial_state.C, tensors_.dinitial_state.n, sequence_.index, head);
  }

 private:
  [[nodiscard]] Tile block(std::int64_t head, std::int64_t begin) const {
    return {sequence_, head, begin, std::min(begin + parallel_block, sequence_.length)};
  }
  [[nodiscard]] std::int64_t offset(std::int64_t head, std::int64_t token) const {
    return head * problem_.tokens() + sequence_.packed + token;
  }
  [[nodiscard]] GateVectors<Real> gates_of(std::int64_t head) const {
    return scratch_.gates.at(problem_, sequence_, head);
  }
  [[nodiscard]] Matrix<const Real> queries(const Tile& tile) const {
    return load_tile(problem_.q, tile, tile.head / problem_.group(), buffers_.q, 0, shape_.dqk);
  }
  [[nodiscard]] Matrix<const Real> keys(const Tile& tile) const {
    return load_tile(problem_.k, tile, tile.head / problem_.group(), buffers_.operands.k, 0, shape_.dqk);
  }
  [[nodiscard]] Matrix<const Real> values(const Tile& tile) const {
    return load_tile(problem_.v, tile, tile.head, buffers_.operands.v, 0, shape_.dhv);
  }
  // dH / den
  [[nodiscard]] Matrix<Real> output_gradients(const Tile& tile) const {
    const Real* inverse = gates_of(tile.head).inverse + tile.begin;
    return load_scaled(tensors_.dh, tile, tile.head, inverse, buffers_.dht, 0, shape_.dhv);
  }
  [[nodiscard]] Matrix<Real> weighted_queries(const Tile& tile, const GateVectors<Real>& gates,
                                              const Matrix<const Real>& Q) const {
    const Matrix<Real> Qb = dense(buffers_.qb, tile.size(), shape_.dqk);
    scale_rows(scale_, gates.qbar + tile.begin, Q, Qb);
    return Qb;
  }
  [[nodiscard]] State<Real> initial_state(std::int64_t head) const {
    State<Real> state = state_in(worker_.state, shape_, all_columns(shape_));
    load_state(problem_.initial_state.C, problem_.initial_state.n, sequence_.index, head, all_columns(shape_), state);
    return state;
  }
  [[nodiscard]] State<Real> last_gradient(std::int64_t head) const {
    State<Real> dstate = state_in(worker_.dstate, shape_, all_columns(shape_));
    load_state(tensors_.dlast_state.C, tensors_.dlast_state.n, sequence_.index, head, all_columns(shape_), dstate);
    return dstate;
  }
  [[nodiscard]] Matrix<Real> scores(const BlockPair& pair, const GateVectors<Real>& gates,
                                    const Matrix<const Real>& Q) const {
    const Matrix<Real> D = dense(buffers_.D, pair.rows.size(), pair.columns.size());
    const Matrix<Real> S = dense(buffers_.S, pair.rows.size(), pair.columns.size());
    gate_square(gates, scale_, pair, worker_.weights, D);
    gated_scores<Real>(pair.square(), Q, keys(pair.columns), D, S);
    return S;
  }
  // dH / den V^T + deta, not yet gated.
  [[nodiscard]] Matrix<Real> score_gradients(const BlockPair& pair, const Matrix<Real>& dHt,
                                             const Matrix<const Real>& V, const Real* deta) const {
    const Matrix<Real> dS = dense(buffers_.dS, pair.rows.size(), pair.columns.size());
    product(dS, dHt, V.t(), Real{0});
    if (problem_.settings.exact) {
      for (std::int64_t t = 0; t < dS.rows; ++t) {
        for (std::int64_t j = 0; j < dS.cols; ++j) dS.row(t)[j] += deta[t];
      }
    }
    return dS;
  }
  // Adds the row and column sums of S . dS, then gates dS by the D that scores() left.
  void gate_scores(const BlockPair& pair, const Matrix<Real>& S, const Matrix<Real>& dS, double* row,
                   double* column) const {
    gate_score_gradients(pair.square(), dense(buffers_.D, S.rows, S.cols), S, dS, row, column);
  }
  void accumulate(const Matrix<Real>& part, const Matrix<Real>& total, std::int64_t member) const {
    const std::int64_t count = part.rows * part.cols;
    if (member == 0) {
      std::copy_n(part.data, count, total.data);
    } else {
      simd::add(Real{1}, part.data, total.data, count);
    }
  }

  const Problem& problem_;
  const MlstmShape& shape_;
  const BackwardTensors& tensors_;
  const Scratch& scratch_;
  const typename Scratch::Worker& worker_;
  const GradientBuffers<Real>& buffers_;
  const Sequence& sequence_;
  Real scale_;
};

}  // namespace

template <class Real>
void run_parallel_backward(const Problem& problem, const BackwardTensors& tensors,
                           const ParallelScratch<Real>& scratch) {
  const Plan& plan = problem.plan;
  const std::int64_t heads = problem.heads();
  const std::int64_t blocks = blocks_of(plan.shape.longest);
  // Calls work(gradients, head, first token) for every head and block of every sequence.
  const auto for_blocks = [&](std::int64_t per_sequence, const auto& work) {
    parallel_for(plan.shape.sequences * per_sequence * blocks, plan.threads, [&](std::int64_t unit, int index) {
      const Sequence sequence = problem.sequence(unit / (per_sequence * blocks));
      const std::int64_t begin = unit % blocks * parallel_block;
      if (begin >= sequence.length) return;
      const auto worker = scratch.workers.at(plan, index);
      work(ParallelGradients<Real>(problem, tensors, scratch, worker, sequence), unit / blocks % per_sequence, begin);
    });
  };
  using Gradients = ParallelGradients<Real>;
  parallel_for(plan.shape.sequences * heads, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / heads);
    gates_and_denominators(problem, scratch.gates, sequence, unit % heads, scratch.workers.at(plan, index).norm);
  });
  if (problem.settings.exact) {
    for_blocks(heads, [](const Gradients& x, std::int64_t head, std::int64_t begin) { x.make_deta(head, begin); });
  }
  for_blocks(plan.shape.qk_heads,
             [](const Gradients& x, std::int64_t qk_head, std::int64_t begin) { x.row_gradients(qk_head, begin); });
  for_blocks(plan.shape.qk_heads,
             [](const Gradients& x, std::int64_t qk_head, std::int64_t begin) { x.column_gradients(qk_head, begin); });
  parallel_for(plan.shape.sequences * heads, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / heads);
    const auto worker = scratch.workers.at(plan, index);
    Gradients(problem, tensors, scratch, worker, sequence).finish(unit % heads);
  });
}

template void run_parallel_backward(const Problem&, const BackwardTensors&, const ParallelScratch<float>&);
template void run_parallel_backward(const Problem&, const BackwardTensors&, const ParallelScratch<double>&);

}  // namespace tfla::cpu
