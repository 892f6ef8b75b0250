#include "cpu/stages/gradients.h"

#include <algorithm>

#include "cpu/kernels/simd.h"

namespace tfla::cpu {

template <class Real>
void gate_score_gradients(Square square, const Matrix<Real>& D, const Matrix<Real>& S, const Matrix<Real>& dS,
                          double* row, double* column) {
  for (std::int64_t t = 0; t < S.rows; ++t) {
    const std::int64_t seen = visible(square, t, S.cols);
    row[t] += simd::add_products(S.row(t), dS.row(t), column, seen);
    simd::multiply(D.row(t), dS.row(t), seen);
    std::fill(dS.row(t) + seen, dS.row(t) + dS.cols, Real{0});
  }
}

// dlogf_t collects every product that f_t decays: pairs of tokens on both sides of t, rows from t on that read the
// incoming state, tokens before t that reach the outgoing one, and the state passing through. Nothing cancels: the row
// and column sums that telescope into the pairs hold the same products, exact in double.
void gate_gradients(const GateSums& sums, double through, std::int64_t count, double* dlogi, double* dlogf) {
  double outflow_before = 0;
  for (std::int64_t t = 0; t < count; ++t) {
    dlogf[t] = through + outflow_before;
    outflow_before += sums.outflow[t];
    dlogi[t] = sums.column[t] + sums.outflow[t];
  }
  double pairs = 0;
  double inflow_after = 0;
  for (std::int64_t t = count - 1; t >= 0; --t) {
    pairs += sums.row[t] - sums.column[t];
    inflow_after += sums.inflow[t];
    dlogf[t] += pairs + inflow_after;
  }
}

template <class Real>
double inner_product(const State<Real>& state, const State<Real>& dstate) {
  double sum = simd::dot(state.n, dstate.n, state.C.rows);
  for (std::int64_t r = 0; r < state.C.rows; ++r) sum += simd::dot(state.C.row(r), dstate.C.row(r), state.C.cols);
  return sum;
}

template <class Real>
GradientBuffers<Real>::GradientBuffers(Arena& arena, const Plan& plan) : operands(arena, plan) {
  const std::int64_t tile = plan.tile;
  q = arena.take<Real>(tile * padded(plan.shape.dqk));
  dht = arena.take<Real>(tile * padded(plan.shape.dhv));
  for (Real** keys : {&qb, &dq, &dk}) *keys = arena.take<Real>(tile * plan.shape.dqk);
  dv = arena.take<Real>(tile * plan.shape.dhv);
  for (Real** square : {&D, &S, &dS}) *square = arena.take<Real>(tile * tile);
  deta = arena.take<Real>(tile);
  for (double** vector : {&row, &column, &inflow, &outflow, &dlogi, &dlogf}) *vector = arena.take<double>(tile);
  epilogue = EpilogueRows<Real>(arena, plan);
}

template <class Real>
void gradients_through_state(const Matrix<const Real>& K, const Matrix<const Real>& V, const Real* abar,
                             const State<Real>& dstate, const Matrix<Real>& Kb, const Matrix<Real>& dK,
                             const Matrix<Real>& dV, double* outflow) {
  scale_rows<Real>(1, abar, K, Kb);
  multiply(Product<Real>{.out = dK, .a = V, .b = dstate.C.t()});
  multiply(Product<Real>{.out = dV, .a = Kb, .b = dstate.C});
  for (std::int64_t t = 0; t < K.rows; ++t) {
    outflow[t] = simd::weigh(abar[t], Kb.row(t), dstate.n, dK.row(t), K.cols);
  }
}

template <class Real>
TileGradients<Real>::TileGradients(const Problem& problem, const TensorView& dh, const Tile& tile,
                                   const GateVectors<Real>& gates, const GradientBuffers<Real>& buffers)
    : problem_(problem),
      tile_(tile),
      settings_(problem.settings),
      gates_(gates),
      buffers_(buffers),
      scale_(static_cast<Real>(problem.settings.scale)) {
  const MlstmShape& shape = problem.plan.shape;
  const std::int64_t rows = tile.size();
  const std::int64_t qk_head = tile.head / problem.group();
  Q_ = load_tile(problem.q, tile, qk_head, buffers.q, 0, shape.dqk);
  K_ = load_tile(problem.k, tile, qk_head, buffers.operands.k, 0, shape.dqk);
  V_ = load_tile(problem.v, tile, tile.head, buffers.operands.v, 0, shape.dhv);
  Qb_ = dense(buffers.qb, rows, shape.dqk);
  Kb_ = dense(buffers.operands.kb, rows, shape.dqk);
  dHt_ = load_output_gradients(problem, dh, tile, gates.inverse, buffers.epilogue, buffers.dht, 0, shape.dhv);
  D_ = dense(buffers.D, rows, rows);
  S_ = dense(buffers.S, rows, rows);
  dS_ = dense(buffers.dS, rows, rows);
  dQ = dense(buffers.dq, rows, shape.dqk);
  dK = dense(buffers.dk, rows, shape.dqk);
  dV = dense(buffers.dv, rows, shape.dhv);
}

template <class Real>
void TileGradients<Real>::row_gradients(const State<Real>& state) const {
  gate_matrix(gates_, scale_, D_);
  gated_scores<Real>(Square::diagonal, Q_, K_, D_, S_);
  scale_rows(scale_, gates_.qbar, Q_, Qb_);
  multiply(Product<Real>{.out = dS_, .a = dHt_, .b = V_.t(), .out_part = Part::lower});
  if (!state.zero) multiply(Product<Real>{.out = dQ, .a = dHt_, .b = state.C.t()});
  if (settings_.exact) exact_rows(state);
}

// deta_t = slope_t (dh.h). dh.h is summed from the parts of h: sum_j S_tj dS_tj + Qb_t.(dHt C^T)_t, so h itself is not
// needed.
template <class Real>
void TileGradients<Real>::exact_rows(const State<Real>& state) const {
  for (std::int64_t t = 0; t < S_.rows; ++t) {
    double dh_h = simd::dot(S_.row(t), dS_.row(t), t + 1);
    if (!state.zero) dh_h += simd::dot(Qb_.row(t), dQ.row(t), Qb_.cols);
    const Real deta = gates_.slope[t] * static_cast<Real>(dh_h);
    buffers_.deta[t] = deta;
    for (std::int64_t j = 0; j <= t; ++j) dS_.row(t)[j] += deta;
    if (!state.zero) simd::add(deta, state.n, dQ.row(t), dQ.cols);
  }
}

template <class Real>
void TileGradients<Real>::finish(const State<Real>& state, const State<Real>& dstate) const {
  const std::int64_t rows = Q_.rows;
  for (double* sums : {buffers_.row, buffers_.column, buffers_.inflow, buffers_.outflow}) std::fill_n(sums, rows, 0.0);
  gate_score_gradients(Square::diagonal, D_, S_, dS_, buffers_.row, buffers_.column);
  for (std::int64_t t = 0; !state.zero && t < rows; ++t) {
    buffers_.inflow[t] = simd::weigh(scale_ * gates_.qbar[t], Qb_.row(t), nullptr, dQ.row(t), dQ.cols);
  }
  const Real dq_beta = state.zero ? Real{0} : Real{1};
  multiply(Product<Real>{.out = dQ, .a = dS_, .b = K_, .beta = dq_beta, .added = dQ, .a_part = Part::lower});
  if (!dstate.zero) gradients_through_state(K_, V_, gates_.abar, dstate, Kb_, dK, dV, buffers_.outflow);
  const Real beta = dstate.zero ? Real{0} : Real{1};
  multiply(Product<Real>{.out = dK, .a = dS_.t(), .b = Q_, .beta = beta, .added = dK, .a_part = Part::upper});
  multiply(Product<Real>{.out = dV, .a = S_.t(), .b = dHt_, .beta = beta, .added = dV, .a_part = Part::upper});
  add_skip_gradients(problem_, tile_, dHt_, buffers_.epilogue, dV);
  const double through =
      state.zero || dstate.zero ? 0.0 : static_cast<double>(gates_.qbar[rows - 1]) * inner_product(state, dstate);
  gate_gradients(
      {.row = buffers_.row, .column = buffers_.column, .inflow = buffers_.inflow, .outflow = buffers_.outflow}, through,
      rows, buffers_.dlogi, buffers_.dlogf);
}

template <class Real>
void TileGradients<Real>::retreat_state(State<Real>& dstate) const {
  retreat<Real>(gates_.qbar[Q_.rows - 1], Qb_, dHt_, settings_.exact ? buffers_.deta : nullptr, dstate);
}

template <class Real>
void retreat(Real decay, const Matrix<const Real>& Qb, const Matrix<const Real>& dHt, const Real* deta,
             State<Real>& dstate) {
  advance_matrix(decay, Qb, dHt, dstate, dstate);
  if (dstate.n != nullptr) {
    Matrix<const Real> contributions = Qb;
    if (deta == nullptr) contributions.rows = 0;
    advance_vector(decay, contributions, deta, dstate, dstate);
  }
  dstate.zero = false;
}

#define TFLA_INSTANTIATE(Real)                                                                                       \
  template struct GradientBuffers<Real>;                                                                             \
  template void gate_score_gradients(Square, const Matrix<Real>&, const Matrix<Real>&, const Matrix<Real>&, double*, \
                                     double*);                                                                       \
  template double inner_product(const State<Real>&, const State<Real>&);                                             \
  template void gradients_through_state(const Matrix<const Real>&, const Matrix<const Real>&, const Real*,           \
                                        const State<Real>&, const Matrix<Real>&, const Matrix<Real>&,                \
                                        const Matrix<Real>&, double*);                                               \
  template class TileGradients<Real>;                                                                                \
  template void retreat(Real, const Matrix<const Real>&, const Matrix<const Real>&, const Real*, State<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
