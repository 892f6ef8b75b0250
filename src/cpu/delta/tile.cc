#include "cpu/delta/tile.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/delta_gates.h"
#include "cpu/gate_tensor.h"
#include "cpu/kernels/simd.h"

namespace tfla::cpu::delta {

namespace {

// Rows of a triangular system that are solved one by one; what they take from other rows is a matrix product.
constexpr std::int64_t solve_rows = 16;

constexpr double norm_eps = 1e-6;

template <class Real>
Matrix<Real> block(const Matrix<Real>& of, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
  return {of.row(row) + col, rows, cols, of.stride, false};
}

template <class Real>
void load_gates(const Problem& problem, const Tile& tile, TileGates<Real>& gates) {
  const std::int64_t count = tile.size();
  double b = 0;
  for (std::int64_t t = 0; t < count; ++t) {
    gates.beta[t] = static_cast<Real>(write_strength(problem, tile.sequence, tile.begin + t, tile.head));
    gates.log_decay[t] = log_decay(problem, tile.sequence, tile.begin + t, tile.head);
    b += gates.log_decay[t];
    gates.b[t] = b;
    gates.minus_b[t] = -b;
  }
  simd::exp_shifted(Real{1}, 0, gates.b, gates.qbar, count);
  simd::exp_shifted(Real{1}, b, gates.minus_b, gates.abar, count);
  gates.gbar = static_cast<Real>(std::exp(b));
}

// Whole vectors, where the row has room for them; what is beyond the diagonal is overwritten.
template <class Real>
void gate_matrix(const TileGates<Real>& gates, const Matrix<Real>& D) {
  constexpr std::int64_t step = 16;
  for (std::int64_t t = 0; t < D.rows; ++t) {
    simd::exp_shifted(Real{1}, gates.b[t], gates.minus_b, D.row(t), std::min((t + step) / step * step, D.cols));
    std::fill(D.row(t) + t + 1, D.row(t) + D.cols, Real{0});
  }
}

template <class Real>
Matrix<Real> load_rows(const Problem& problem, const TensorView& view, const Tile& tile, Real* buffer, Real* norms) {
  const std::int64_t dqk = problem.plan.shape.dqk;
  const std::int64_t head = tile.head / problem.group();
  (void)load_tile<Real>(view, tile, head, buffer, 0, dqk);
  const Matrix<Real> rows = spread(buffer, tile.size(), dqk);
  for (std::int64_t t = 0; problem.plan.options.normalize_qk && t < rows.rows; ++t) {
    norms[t] = inverse_norm(rows.row(t), dqk);
    simd::scale(norms[t], rows.row(t), rows.row(t), dqk);
  }
  return rows;
}

std::byte* state_row(const MutableTensorView& view, std::int64_t index, std::int64_t head, std::int64_t row,
                     std::int64_t col) {
  const std::int64_t at = index * view.strides[0] + head * view.strides[1] + row * view.strides[2] + col;
  return static_cast<std::byte*>(view.data) + at * item_size(view.dtype);
}

}  // namespace

double write_strength(const Problem& problem, const Sequence& sequence, std::int64_t token, std::int64_t head) {
  return write_strength(problem.plan.options.write,
                        read_gate(problem.beta, gate_offset(problem.beta, sequence, token, head)));
}

double log_decay(const Problem& problem, const Sequence& sequence, std::int64_t token, std::int64_t head) {
  if (!problem.g.given()) return 0;
  const double g = read_gate(problem.g, gate_offset(problem.g, sequence, token, head));
  if (!problem.A_log.given()) return limit_decay(g);
  const double bias = problem.dt_bias.given() ? read_gate(problem.dt_bias, head * problem.dt_bias.strides[0]) : 0.0;
  const double rate = std::exp(read_gate(problem.A_log, head * problem.A_log.strides[0]));
  return limit_decay(-rate * softplus(g + bias));
}

template <class Real>
Real inverse_norm(const Real* x, std::int64_t n) {
  return static_cast<Real>(1 / std::sqrt(simd::dot(x, x, n) + norm_eps));
}

template <class Real>
TileGates<Real>::TileGates(Arena& arena, const DeltaPlan& plan) {
  for (Real** vector : {&beta, &qbar, &abar}) *vector = arena.take<Real>(plan.tile);
  for (double** vector : {&b, &minus_b, &log_decay}) *vector = arena.take<double>(plan.tile);
}

template <class Real>
TileBuffers<Real>::TileBuffers(Arena& arena, const DeltaPlan& plan) : gates(arena, plan) {
  for (Real** rows : {&q, &k, &scaled}) *rows = arena.take<Real>(spread_size(plan.tile, plan.shape.dqk));
  for (Real** norms : {&q_norm, &k_norm}) *norms = arena.take<Real>(plan.tile);
  for (Real** square : {&D, &minus_L, &P}) *square = arena.take<Real>(spread_size(plan.tile, plan.tile));
}

template <class Real>
TileKeys<Real> load_keys(const Problem& problem, const Tile& tile, TileBuffers<Real>& buffers) {
  const std::int64_t count = tile.size();
  load_gates(problem, tile, buffers.gates);
  const TileKeys<Real> keys{.gates = &buffers.gates,
                            .K = load_rows(problem, problem.k, tile, buffers.k, buffers.k_norm),
                            .scaled = spread(buffers.scaled, count, problem.plan.shape.dqk),
                            .D = spread(buffers.D, count, count),
                            .minus_L = spread(buffers.minus_L, count, count)};
  gate_matrix(buffers.gates, keys.D);
  multiply(Product<Real>{.out = keys.minus_L, .a = keys.K, .b = keys.K.t(), .out_part = Part::lower});
  for (std::int64_t t = 0; t < count; ++t) {
    Real* row = keys.minus_L.row(t);
    simd::multiply(keys.D.row(t), row, t);
    simd::scale(Real{-1}, row, row, t);
    std::fill(row + t, row + count, Real{0});
  }
  return keys;
}

template <class Real>
Matrix<Real> load_queries(const Problem& problem, const Tile& tile, const TileBuffers<Real>& buffers) {
  return load_rows(problem, problem.q, tile, buffers.q, buffers.q_norm);
}

template <class Real>
void gated_scores(Real scale, const Matrix<const Real>& Q, const TileKeys<Real>& keys, const Matrix<Real>& P) {
  multiply(Product<Real>{.out = P, .a = Q, .b = keys.K.t(), .out_part = Part::lower});
  for (std::int64_t t = 0; t < P.rows; ++t) {
    simd::multiply(keys.D.row(t), P.row(t), t + 1);
    simd::scale(scale, P.row(t), P.row(t), t + 1);
    std::fill(P.row(t) + t + 1, P.row(t) + P.cols, Real{0});
  }
}

template <class Real>
Matrix<Real> scaled_rows(Real scale, const Real* factors, const Matrix<const Real>& x, const Matrix<Real>& out) {
  scale_rows(scale, factors, x, out);
  return out;
}

template <class Real>
void residuals(const TileKeys<Real>& keys, const State<Real>& state, const Matrix<Real>& r, const Matrix<Real>& w) {
  const Real* beta = keys.gates->beta;
  if (!state.zero) product(r, scaled_rows<Real>(-1, keys.gates->qbar, keys.K, keys.scaled), state.C, 1);
  for (std::int64_t begin = 0; begin < r.rows; begin += solve_rows) {
    const std::int64_t count = std::min(solve_rows, r.rows - begin);
    if (begin > 0) {
      product(block(r, begin, count, 0, r.cols), block(keys.minus_L, begin, count, 0, begin),
              block(w, 0, begin, 0, w.cols), 1);
    }
    for (std::int64_t t = begin; t < begin + count; ++t) {
      for (std::int64_t j = begin; j < t; ++j) simd::add(keys.minus_L.row(t)[j], w.row(j), r.row(t), r.cols);
      simd::scale(beta[t], r.row(t), w.row(t), r.cols);
    }
  }
}

template <class Real>
void residual_gradients(const TileKeys<Real>& keys, const Matrix<Real>& dX, const Matrix<Real>& dV) {
  const Real* beta = keys.gates->beta;
  for (std::int64_t begin = (dX.rows - 1) / solve_rows * solve_rows; begin >= 0; begin -= solve_rows) {
    const std::int64_t end = std::min(begin + solve_rows, dX.rows), rest = dX.rows - end;
    if (rest > 0) {
      product(block(dX, begin, end - begin, 0, dX.cols), block(keys.minus_L, end, rest, begin, end - begin).t(),
              block(dV, end, rest, 0, dV.cols), 1);
    }
    for (std::int64_t j = end - 1; j >= begin; --j) {
      for (std::int64_t t = j + 1; t < end; ++t) simd::add(keys.minus_L.row(t)[j], dV.row(t), dX.row(j), dX.cols);
      simd::scale(beta[j], dX.row(j), dV.row(j), dX.cols);
    }
  }
}

template <class Real>
void advance(const TileKeys<Real>& keys, const Matrix<const Real>& w, const State<Real>& from, State<Real>& to) {
  const Matrix<Real> weighted = scaled_rows<Real>(1, keys.gates->abar, keys.K, keys.scaled);
  multiply(Product<Real>{.out = to.C,
                         .a = weighted.t(),
                         .b = w,
                         .beta = from.zero ? Real{0} : keys.gates->gbar,
                         .added = from.zero ? Matrix<Real>{} : from.C});
  to.zero = false;
}

template <class Real>
void load_state(const TensorView& view, std::int64_t index, std::int64_t head, Columns columns, State<Real>& state) {
  state.zero = !view.given();
  for (std::int64_t row = 0; !state.zero && row < state.C.rows; ++row) {
    const std::int64_t at = index * view.strides[0] + head * view.strides[1] + row * view.strides[2] + columns.first;
    std::copy_n(static_cast<const Real*>(view.data) + at, columns.width, state.C.row(row));
  }
}

template <class Real>
void store_state(const State<Real>& state, const MutableTensorView& view, std::int64_t index, std::int64_t head,
                 Columns columns) {
  for (std::int64_t row = 0; view.given() && row < state.C.rows; ++row) {
    auto* to = reinterpret_cast<Real*>(state_row(view, index, head, row, columns.first));
    if (state.zero) {
      std::fill_n(to, columns.width, Real{0});
    } else {
      std::copy_n(state.C.row(row), columns.width, to);
    }
  }
}

#define TFLA_INSTANTIATE(Real)                                                                                  \
  template struct TileGates<Real>;                                                                              \
  template struct TileBuffers<Real>;                                                                            \
  template Real inverse_norm(const Real*, std::int64_t);                                                        \
  template TileKeys<Real> load_keys(const Problem&, const Tile&, TileBuffers<Real>&);                           \
  template Matrix<Real> load_queries(const Problem&, const Tile&, const TileBuffers<Real>&);                    \
  template void gated_scores(Real, const Matrix<const Real>&, const TileKeys<Real>&, const Matrix<Real>&);      \
  template Matrix<Real> scaled_rows(Real, const Real*, const Matrix<const Real>&, const Matrix<Real>&);         \
  template void residuals(const TileKeys<Real>&, const State<Real>&, const Matrix<Real>&, const Matrix<Real>&); \
  template void residual_gradients(const TileKeys<Real>&, const Matrix<Real>&, const Matrix<Real>&);            \
  template void advance(const TileKeys<Real>&, const Matrix<const Real>&, const State<Real>&, State<Real>&);    \
  template void load_state(const TensorView&, std::int64_t, std::int64_t, Columns, State<Real>&);               \
  template void store_state(const State<Real>&, const MutableTensorView&, std::int64_t, std::int64_t, Columns)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu::delta
