// Stage `gradients`: dQ, dK, dV and the gate gradients of one tile, from the state at its beginning and the gradient of
// the state at its end.
#pragma once

#include "cpu/stages/epilogue.h"
#include "cpu/stages/states.h"

namespace tfla::cpu {

// Work space of a thread for one tile.
template <class Real>
struct GradientBuffers {
  StateBuffers<Real> operands;  // K, V, abar K
  Real* q = nullptr;            // [tile,dqk] converted queries
  Real* qb = nullptr;           // [tile,dqk] scale qbar Q
  Real* dht = nullptr;          // [tile,dhv] dH / den
  Real* D = nullptr;            // [tile,tile] gate matrix
  Real* S = nullptr;            // [tile,tile] gated scores
  Real* dS = nullptr;           // [tile,tile] dH / den V^T, then its gated form
  Real* dq = nullptr;           // [tile,dqk]
  Real* dk = nullptr;           // [tile,dqk]
  Real* dv = nullptr;           // [tile,dhv]
  Real* deta = nullptr;         // [tile] gradient of q.n; only with the exact normalizer gradient
  double* row = nullptr;        // [tile] sums over j of S_tj dS_tj, and of the state's part
  double* column = nullptr;     // [tile] sums over t of S_tj dS_tj
  double* inflow = nullptr;     // [tile] what row t gets through the incoming state
  double* outflow = nullptr;    // [tile] what token j gets through the outgoing state
  double* dlogi = nullptr;      // [tile]
  double* dlogf = nullptr;      // [tile]
  EpilogueRows<Real> epilogue;

  GradientBuffers() = default;
  GradientBuffers(Arena& arena, const Plan& plan);
};

// Sums over the products S_tj dS_tj, in double, and over what passes through the states: all that gate gradients need.
struct GateSums {
  const double* row;      // over j
  const double* column;   // over t
  const double* inflow;   // what row t gets through the incoming state
  const double* outflow;  // what token j gets through the outgoing state
};

// Adds row and column sums of S . dS, then gates dS: dS = D . dS, zero above the diagonal.
template <class Real>
void gate_score_gradients(Square square, const Matrix<Real>& D, const Matrix<Real>& S, const Matrix<Real>& dS,
                          double* row, double* column);

// Gradients of the log gates of consecutive tokens; `through`: what passes from the incoming to the outgoing state.
void gate_gradients(const GateSums& sums, double through, std::int64_t count, double* dlogi, double* dlogf);

// <C, dC> + <n, dn>
template <class Real>
[[nodiscard]] double inner_product(const State<Real>& state, const State<Real>& dstate);

// The part of dK and dV that comes through the outgoing state: dK = abar (V dC^T + dn), dV = (abar K) dC, and its share
// of the gate gradients. `Kb` is work space.
template <class Real>
void gradients_through_state(const Matrix<const Real>& K, const Matrix<const Real>& V, const Real* abar,
                             const State<Real>& dstate, const Matrix<Real>& Kb, const Matrix<Real>& dK,
                             const Matrix<Real>& dV, double* outflow);

// One tile, its operands loaded. The parts are called in this order; the first is also what the reverse-time states
// need to know of each row when the normalizer gradient is exact.
template <class Real>
class TileGradients {
 public:
  TileGradients(const Problem& problem, const TensorView& dh, const Tile& tile, const GateVectors<Real>& gates,
                const GradientBuffers<Real>& buffers);

  // S, dH / den, dS, dQ's part through C and, with the exact normalizer gradient, deta.
  void row_gradients(const State<Real>& state) const;
  // dq, dk, dv, dlogi and dlogf of the buffers, from the gradient of the state at the end of the tile.
  void finish(const State<Real>& state, const State<Real>& dstate) const;
  // That gradient becomes the one at the beginning of the tile.
  void retreat_state(State<Real>& dstate) const;

  Matrix<Real> dQ, dK, dV;

 private:
  void exact_rows(const State<Real>& state) const;

  const Problem& problem_;
  const Tile& tile_;
  const Settings& settings_;
  const GateVectors<Real>& gates_;
  const GradientBuffers<Real>& buffers_;
  Real scale_;
  Matrix<const Real> Q_, K_, V_;
  Matrix<Real> Qb_, Kb_, dHt_, D_, S_, dS_;
};

// The gradient of the state at the end of a tile becomes the one at its beginning: dC = gbar dC + Qb^T (dH / den),
// dn = gbar dn + Qb^T deta (null: zero). Qb: scale qbar Q.
template <class Real>
void retreat(Real decay, const Matrix<const Real>& Qb, const Matrix<const Real>& dHt, const Real* deta,
             State<Real>& dstate);

}  // namespace tfla::cpu
