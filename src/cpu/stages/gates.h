// Stage `gates`: the raw gates of one head become the vectors that every matrix stage reads, and gate gradients
// return the same way. Everything that tells mLSTMexp, mLSTMsig and their relatives apart is in here.
#pragma once

#include "core/arena.h"
#include "cpu/problem.h"

namespace tfla::cpu {

// Per token, relative to its tile (b: cumulative log f inside the tile, m: max state; docs/numerics.md):
//   u = b - m, c = log i - b, so D_tj = exp(u_t + c_j) for j <= t
//   qbar = exp(u + m_prev)  weight of the tile's incoming state in row t
//   abar = exp(u_L + c)     weight of token j in the tile's outgoing state: the last row of D
// The decay of the state over the tile is qbar of its last token.
template <class Real>
struct GateVectors {
  double* u = nullptr;
  double* c = nullptr;
  double* minus_m = nullptr;
  Real* qbar = nullptr;
  Real* abar = nullptr;
  Real* inverse = nullptr;   // 1 / den of row t (denominators.h)
  Real* slope = nullptr;     // derivative of den by q.n, times -1 / den; for the exact normalizer gradient
  double* m_last = nullptr;  // [N,H]

  GateVectors() = default;
  GateVectors(Arena& arena, const Plan& plan);

  // The vectors from token `begin` of a sequence on, for one head.
  [[nodiscard]] GateVectors at(const Problem& problem, const Sequence& sequence, std::int64_t head,
                               std::int64_t begin = 0) const;
};

// m of the initial state; 0 without one.
[[nodiscard]] double initial_max(const Problem& problem, const Sequence& sequence, std::int64_t head);

// The numbers of one head of a [B,T,H] tensor.
void read_gates(const TensorView& view, const Sequence& sequence, std::int64_t head, double* to);

// log f and log i of every token of one (sequence, head) that starts from max state m.
void log_gates(const Problem& problem, const Sequence& sequence, std::int64_t head, double m, double* log_f,
               double* log_i);

// Fills the vectors of one (sequence, head).
template <class Real>
void gates(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence, std::int64_t head);

// m of every last state, [N,H], into the caller's tensor where it is given.
template <class Real>
void store_max_states(const Problem& problem, const double* m_last, const MutableTensorView& m);

// Gradients of log i and log f of tokens [begin, begin + count) become gradients of the raw gates, in the caller's
// tensors.
void store_gate_gradients(const Problem& problem, const Sequence& sequence, std::int64_t head, std::int64_t begin,
                          std::int64_t count, const double* dlogi, const double* dlogf, const MutableTensorView& di,
                          const MutableTensorView& df);

}  // namespace tfla::cpu
