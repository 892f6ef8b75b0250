#include "cpu/gradients.h"

#include <cmath>

#include "cpu/simd.h"

namespace tfla::cpu {

namespace {

// The matrices of a tile, by the letters of the spec.
template <class Real>
struct Operands {
  Matrix<const Real> Q, K, V;
  Matrix<Real> Qb, dHt, D, S, dS, dQ, dK, dV;

  Operands(const Problem& problem, const Tile& tile, const GradientBuffers<Real>& buffers) {
    const MlstmShape& shape = problem.plan.shape;
    const std::int64_t rows = tile.size();
    const std::int64_t qk_head = tile.head / problem.group();
    Q = load_tile(problem.q, tile, qk_head, buffers.q, 0, shape.dqk);
    K = load_tile(problem.k, tile, qk_head, buffers.operands.k, 0, shape.dqk);
    V = load_tile(problem.v, tile, tile.head, buffers.operands.v, 0, shape.dhv);
    Qb = dense(buffers.qb, rows, shape.dqk);
    dHt = dense(buffers.dht, rows, shape.dhv);
    D = dense(buffers.D, rows, rows);
    S = dense(buffers.S, rows, rows);
    dS = dense(buffers.dS, rows, rows);
    dQ = dense(buffers.dq, rows, shape.dqk);
    dK = dense(buffers.dk, rows, shape.dqk);
    dV = dense(buffers.dv, rows, shape.dhv);
  }
};

// deta_t = -sign(q.n) (dh.h) / den where |q.n| is the denominator. dh.h is summed from the parts of h:
// sum_j S_tj dS_tj + Qb_t.(dHt C^T)_t, so h itself is not needed.
template <class Real>
void exact_rows(const GateVectors<Real>& gates, const State<Real>& state, const Operands<Real>& x,
                const GradientBuffers<Real>& buffers) {
  for (std::int64_t t = 0; t < x.S.rows; ++t) {
    double dh_h = simd::dot(x.S.row(t), x.dS.row(t), t + 1);
    if (!state.zero) dh_h += simd::dot(x.Qb.row(t), x.dQ.row(t), x.Qb.cols);
    const Real qn = buffers.qn[t];
    const bool active = std::abs(qn) > gates.floor[t];
    const Real deta = active ? static_cast<Real>(std::copysign(1.0, -static_cast<double>(qn)) * dh_h) * buffers.inverse[t]
                             : Real{0};
    buffers.deta[t] = deta;
    for (std::int64_t j = 0; j <= t; ++j) x.dS.row(t)[j] += deta;
    if (!state.zero) simd::add(deta, state.n, x.dQ.row(t), x.dQ.cols);
  }
}

}  // namespace

template <class Real>
void gate_score_gradients(Square square, const Matrix<Real>& D, const Matrix<Real>& S, const Matrix<Real>& dS, double* row,
                          double* column) {
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
  for (Real** keys : {&q, &qb, &dq, &dk}) *keys = arena.take<Real>(tile * plan.shape.dqk);
  for (Real** values : {&dh, &dht, &dv}) *values = arena.take<Real>(tile * plan.shape.dhv);
  for (Real** square : {&D, &S, &dS}) *square = arena.take<Real>(tile * tile);
  for (Real** vector : {&qn, &inverse, &deta}) *vector = arena.take<Real>(tile);
  for (double** vector : {&row, &column, &inflow, &outflow, &dlogi, &dlogf}) *vector = arena.take<double>(tile);
}

template <class Real>
void tile_denominators(const Problem& problem, const Tile& tile, const GateVectors<Real>& gates, const State<Real>& state,
                       const GradientBuffers<Real>& buffers) {
  const Settings& settings = problem.settings;
  const Operands<Real> x(problem, tile, buffers);
  const auto scale = static_cast<Real>(settings.scale);
  gate_matrix(gates, scale, x.D);
  gated_scores<Real>(Square::diagonal, x.Q, x.K, x.D, x.S, buffers.qn);
  scale_rows(scale, gates.qbar, x.Q, x.Qb);
  for (std::int64_t t = 0; settings.normalized && !state.zero && t < tile.size(); ++t) {
    buffers.qn[t] += static_cast<Real>(simd::dot(x.Qb.row(t), state.n, x.Qb.cols));
  }
  inverse_denominators(settings, buffers.qn, gates.floor, buffers.inverse, tile.size());
}

template <class Real>
void tile_row_gradients(const Problem& problem, const TensorView& dh, const Tile& tile, const GateVectors<Real>& gates,
                        const State<Real>& state, const GradientBuffers<Real>& buffers) {
  const Operands<Real> x(problem, tile, buffers);
  const Matrix<const Real> dH = load_tile(dh, tile, tile.head, buffers.dh, 0, problem.plan.shape.dhv);
  scale_rows<Real>(1, buffers.inverse, dH, x.dHt);
  product(x.dS, x.dHt, x.V.t(), Real{0});
  if (!state.zero) product(x.dQ, x.dHt, Matrix<const Real>(state.C).t(), Real{0});
  if (problem.settings.exact) exact_rows(gates, state, x, buffers);
}

template <class Real>
void tile_gradients(const Problem& problem, const Tile& tile, const GateVectors<Real>& gates, const State<Real>& state,
                    const State<Real>& dstate, const GradientBuffers<Real>& buffers) {
  const Operands<Real> x(problem, tile, buffers);
  const std::int64_t rows = tile.size();
  const auto scale = static_cast<Real>(problem.settings.scale);

  std::fill_n(buffers.row, rows, 0.0);
  std::fill_n(buffers.column, rows, 0.0);
  gate_score_gradients(Square::diagonal, x.D, x.S, x.dS, buffers.row, buffers.column);

  std::fill_n(buffers.inflow, rows, 0.0);
  for (std::int64_t t = 0; !state.zero && t < rows; ++t) {
    buffers.inflow[t] = simd::dot(x.Qb.row(t), x.dQ.row(t), x.dQ.cols);
    simd::scale(scale * gates.qbar[t], x.dQ.row(t), x.dQ.row(t), x.dQ.cols);
  }
  product(x.dQ, x.dS, x.K, state.zero ? Real{0} : Real{1});

  std::fill_n(buffers.outflow, rows, 0.0);
  const Real beta = dstate.zero ? Real{0} : Real{1};
  if (!dstate.zero) {
    const Matrix<Real> Kb = dense(buffers.operands.kb, rows, x.K.cols);
    scale_rows<Real>(1, gates.abar, x.K, Kb);
    product(x.dK, x.V, Matrix<const Real>(dstate.C).t(), Real{0});
    product(x.dV, Kb, dstate.C, Real{0});
    for (std::int64_t t = 0; t < rows; ++t) {
      simd::add(Real{1}, dstate.n, x.dK.row(t), x.dK.cols);
      buffers.outflow[t] = simd::dot(Kb.row(t), x.dK.row(t), x.dK.cols);
      simd::scale(gates.abar[t], x.dK.row(t), x.dK.row(t), x.dK.cols);
    }
  }
  product(x.dK, Matrix<const Real>(x.dS).t(), x.Q, beta);
  product(x.dV, Matrix<const Real>(x.S).t(), x.dHt, beta);

  const double through =
      state.zero || dstate.zero ? 0.0 : static_cast<double>(gates.qbar[rows - 1]) * inner_product(state, dstate);
  gate_gradients({.row = buffers.row, .column = buffers.column, .inflow = buffers.inflow, .outflow = buffers.outflow},
                 through, rows, buffers.dlogi, buffers.dlogf);
}

template <class Real>
void retreat(Real decay, const Matrix<const Real>& Qb, const Matrix<const Real>& dHt, const Real* deta,
             State<Real>& dstate) {
  advance_matrix(decay, Qb, dHt, dstate.zero, dstate.C);
  if (dstate.n != nullptr) {
    Matrix<const Real> contributions = Qb;
    if (deta == nullptr) contributions.rows = 0;
    advance_vector(decay, contributions, deta, dstate.zero, dstate.n);
  }
  dstate.zero = false;
}

#define TFLA_INSTANTIATE(Real)                                                                                         \
  template struct GradientBuffers<Real>;                                                                               \
  template void gate_score_gradients(Square, const Matrix<Real>&, const Matrix<Real>&, const Matrix<Real>&, double*,   \
                                     double*);                                                                         \
  template double inner_product(const State<Real>&, const State<Real>&);                                               \
  template void tile_denominators(const Problem&, const Tile&, const GateVectors<Real>&, const State<Real>&,            \
                                  const GradientBuffers<Real>&);                                                       \
  template void tile_row_gradients(const Problem&, const TensorView&, const Tile&, const GateVectors<Real>&,           \
                                   const State<Real>&, const GradientBuffers<Real>&);                                  \
  template void tile_gradients(const Problem&, const Tile&, const GateVectors<Real>&, const State<Real>&,              \
                               const State<Real>&, const GradientBuffers<Real>&);                                      \
  template void retreat(Real, const Matrix<const Real>&, const Matrix<const Real>&, const Real*, State<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
