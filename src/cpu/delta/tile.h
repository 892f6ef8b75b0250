// What forward and backward of the delta rule share: the gates, keys, scores and residuals of a tile, and the state.
//
//   r = V - (qbar K) C - L (beta r)     w = beta r     C' = gbar C + (abar K)^T w     L_tj = D_tj k_t.k_j for j < t
//
// D_tj = exp(b_t - b_j) with b the sums of log decays since the tile began; qbar = exp(b), abar and gbar are what is
// left of a token and of the state at the tile's end. r comes from one triangular system per tile, solved from the top:
// no inverse is formed, so that nothing cancels where keys repeat.
#pragma once

#include "core/arena.h"
#include "cpu/delta/problem.h"
#include "cpu/kernels/product.h"
#include "cpu/tile.h"

namespace tfla::cpu::delta {

// Columns of the state, and of v and h, that a thread works on.
struct Columns {
  std::int64_t first = 0;
  std::int64_t width = 0;
};

template <class Real>
struct TileGates {
  Real* beta = nullptr;
  Real* qbar = nullptr;
  Real* abar = nullptr;
  double* b = nullptr;
  double* minus_b = nullptr;
  double* log_decay = nullptr;
  Real gbar = 1;

  TileGates() = default;
  TileGates(Arena& arena, const DeltaPlan& plan);
};

// Columns of C of one head, or of its gradient. `zero`: it is zero, the memory is not initialised, and products with it
// are skipped.
template <class Real>
struct State {
  Matrix<Real> C;  // [dqk,width]
  bool zero = true;
};

// Work space for one tile.
template <class Real>
struct TileBuffers {
  TileGates<Real> gates;
  Real* q = nullptr;        // [tile,dqk]
  Real* k = nullptr;        // [tile,dqk]
  Real* q_norm = nullptr;   // [tile] 1 / |q|, where q and k are normalised
  Real* k_norm = nullptr;   // [tile]
  Real* scaled = nullptr;   // [tile,dqk] rows of q or k, each times a factor
  Real* D = nullptr;        // [tile,tile]
  Real* minus_L = nullptr;  // [tile,tile]
  Real* P = nullptr;        // [tile,tile]

  TileBuffers() = default;
  TileBuffers(Arena& arena, const DeltaPlan& plan);
};

// Numbers of a matrix with padded rows.
[[nodiscard]] inline std::int64_t spread_size(std::int64_t rows, std::int64_t cols) { return rows * padded(cols); }

// The keys of a tile and everything that follows from them and the gates alone.
template <class Real>
struct TileKeys {
  const TileGates<Real>* gates = nullptr;
  Matrix<Real> K;        // [L,dqk] normalised where the options say so
  Matrix<Real> scaled;   // [L,dqk] work space
  Matrix<Real> D;        // [L,L] zero above the diagonal
  Matrix<Real> minus_L;  // [L,L] zero on the diagonal and above it
};
template <class Real>
[[nodiscard]] TileKeys<Real> load_keys(const Problem& problem, const Tile& tile, TileBuffers<Real>& buffers);

// Rows of q of a tile, normalised where the options say so.
template <class Real>
[[nodiscard]] Matrix<Real> load_queries(const Problem& problem, const Tile& tile, const TileBuffers<Real>& buffers);

// P_tj = scale D_tj q_t.k_j for j <= t; zero above the diagonal.
template <class Real>
void gated_scores(Real scale, const Matrix<const Real>& Q, const TileKeys<Real>& keys, const Matrix<Real>& P);

// Rows of x, each times its factor and `scale`, into `out`, which is returned.
template <class Real>
Matrix<Real> scaled_rows(Real scale, const Real* factors, const Matrix<const Real>& x, const Matrix<Real>& out);

// r and w = beta r. r holds the values of the tile on entry.
template <class Real>
void residuals(const TileKeys<Real>& keys, const State<Real>& state, const Matrix<Real>& r, const Matrix<Real>& w);

// The transposed system: dX_j = dX_j - sum over t > j of L_tj dV_t, dV = beta dX. dX holds its right side on entry.
template <class Real>
void residual_gradients(const TileKeys<Real>& keys, const Matrix<Real>& dX, const Matrix<Real>& dV);

// The state at the end of a tile from the one at its beginning, which may be the same memory.
template <class Real>
void advance(const TileKeys<Real>& keys, const Matrix<const Real>& w, const State<Real>& from, State<Real>& to);

// From and to the caller's tensors. A view that is not given is zero, or not written.
template <class Real>
void load_state(const TensorView& view, std::int64_t index, std::int64_t head, Columns columns, State<Real>& state);
template <class Real>
void store_state(const State<Real>& state, const MutableTensorView& view, std::int64_t index, std::int64_t head,
                 Columns columns);

// The logarithm of a token's decay, with its limit.
[[nodiscard]] double log_decay(const Problem& problem, const Sequence& sequence, std::int64_t token, std::int64_t head);
[[nodiscard]] double write_strength(const Problem& problem, const Sequence& sequence, std::int64_t token,
                                    std::int64_t head);

// 1 / sqrt(|x|^2 + 1e-6).
template <class Real>
[[nodiscard]] Real inverse_norm(const Real* x, std::int64_t n);

}  // namespace tfla::cpu::delta
