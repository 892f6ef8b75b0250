#include "cpu/stages/states.h"

#include <cstring>

#include "cpu/kernels/simd.h"

namespace tfla::cpu {

namespace {

template <class Real>
Real* state_row(const MutableTensorView& view, std::int64_t offset) {
  return static_cast<Real*>(view.data) + offset;
}

template <class Real>
const Real* state_row(const TensorView& view, std::int64_t offset) {
  return static_cast<const Real*>(view.data) + offset;
}

template <class Real>
void copy(const Real* from, Real* to, std::int64_t count) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(Real));
}

// Rows of the caller's C, whose numbers lie `step` apart: the state space dual has its states the other way round.
template <class Real>
void gather(const Real* from, std::int64_t step, Real* to, std::int64_t count) {
  if (step == 1) return copy(from, to, count);
  for (std::int64_t c = 0; c < count; ++c) to[c] = from[c * step];
}
template <class Real>
void scatter(const Real* from, Real* to, std::int64_t step, std::int64_t count) {
  if (step == 1) return copy(from, to, count);
  for (std::int64_t c = 0; c < count; ++c) to[c * step] = from[c];
}

}  // namespace

template <class Real>
void copy_state(const State<Real>& from, State<Real>& to) {
  to.zero = from.zero;
  if (from.zero) return;
  for (std::int64_t r = 0; r < from.C.rows; ++r) copy(from.C.row(r), to.C.row(r), from.C.cols);
  if (from.n != nullptr) copy(from.n, to.n, from.C.rows);
}

template <class Real>
void load_state(const TensorView& C, const TensorView& n, std::int64_t sequence, std::int64_t head, Columns columns,
                State<Real>& state) {
  state.zero = !C.given() && !n.given();
  if (state.zero) return;
  for (std::int64_t r = 0; r < state.C.rows; ++r) {
    if (C.given()) {
      const std::int64_t offset = sequence * C.strides[0] + head * C.strides[1] + r * C.strides[2];
      gather(state_row<Real>(C, offset + columns.first * C.strides[3]), C.strides[3], state.C.row(r), columns.width);
    } else {
      std::fill_n(state.C.row(r), columns.width, Real{0});
    }
  }
  if (state.n == nullptr) return;
  if (n.given()) {
    copy(state_row<Real>(n, sequence * n.strides[0] + head * n.strides[1]), state.n, state.C.rows);
  } else {
    std::fill_n(state.n, state.C.rows, Real{0});
  }
}

template <class Real>
void store_state(const State<Real>& state, const MutableTensorView& C, const MutableTensorView& n,
                 std::int64_t sequence, std::int64_t head) {
  if (C.given()) {
    for (std::int64_t r = 0; r < state.C.rows; ++r) {
      Real* row = state_row<Real>(C, sequence * C.strides[0] + head * C.strides[1] + r * C.strides[2]);
      if (state.zero) {
        for (std::int64_t c = 0; c < state.C.cols; ++c) row[c * C.strides[3]] = 0;
      } else {
        scatter(state.C.row(r), row, C.strides[3], state.C.cols);
      }
    }
  }
  if (n.given()) {
    Real* row = state_row<Real>(n, sequence * n.strides[0] + head * n.strides[1]);
    if (state.zero) {
      std::fill_n(row, state.C.rows, Real{0});
    } else {
      copy(state.n, row, state.C.rows);
    }
  }
}

template <class Real>
void advance_matrix(Real decay, const Matrix<const Real>& X, const Matrix<const Real>& Y, const State<Real>& from,
                    const State<Real>& to, const State<Real>& stored) {
  const Real beta = from.zero ? Real{0} : decay;
  multiply(Product<Real>{.out = to.C, .a = X.t(), .b = Y, .beta = beta, .added = from.C, .copy = stored.C.data});
}

template <class Real>
void advance_vector(Real decay, const Matrix<const Real>& X, const Real* weights, const State<Real>& from,
                    const State<Real>& to) {
  if (from.zero) {
    std::fill_n(to.n, X.cols, Real{0});
  } else {
    simd::scale(decay, from.n, to.n, X.cols);
  }
  for (std::int64_t t = 0; t < X.rows; ++t) {
    simd::add(weights == nullptr ? Real{1} : weights[t], X.row(t), to.n, X.cols);
  }
}

template <class Real>
StateBuffers<Real>::StateBuffers(Arena& arena, const Plan& plan) {
  k = arena.take<Real>(plan.tile * padded(plan.shape.dqk));
  v = arena.take<Real>(plan.tile * padded(plan.shape.dhv));
  kb = arena.take<Real>(plan.tile * plan.shape.dqk);
}

template <class Real>
TileKeys<Real> load_keys(const Problem& problem, const Tile& tile, const StateBuffers<Real>& buffers, Columns columns) {
  const std::int64_t dqk = problem.plan.shape.dqk;
  return {.K = load_tile(problem.k, tile, tile.head / problem.group(), buffers.k, 0, dqk),
          .V = load_tile(problem.v, tile, tile.head, buffers.v, columns.first, columns.width),
          .Kb = dense(buffers.kb, tile.size(), dqk)};
}

template <class Real>
TileKeys<Real> load_values(const Problem& problem, const Tile& tile, const StateBuffers<Real>& buffers,
                           Columns columns) {
  const std::int64_t dqk = problem.plan.shape.dqk;
  return {.K = spread<const Real>(buffers.k, tile.size(), dqk),
          .V = load_tile(problem.v, tile, tile.head, buffers.v, columns.first, columns.width),
          .Kb = dense(buffers.kb, tile.size(), dqk)};
}

template <class Real>
void advance(const TileKeys<Real>& keys, const GateVectors<Real>& gates, const State<Real>& from, State<Real>& to,
             const State<Real>& stored) {
  const Real decay = gates.qbar[keys.K.rows - 1];
  scale_rows<Real>(1, gates.abar, keys.K, keys.Kb);
  advance_matrix<Real>(decay, keys.Kb, keys.V, from, to, stored);
  if (to.n != nullptr) advance_vector<Real>(decay, keys.Kb, nullptr, from, to);
  if (stored.n != nullptr) copy(to.n, stored.n, keys.K.cols);
  to.zero = false;
}

template <class Real>
void states_at_spans(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence,
                     std::int64_t head, Columns columns, const StateBuffers<Real>& buffers, Real* states) {
  const Plan& plan = problem.plan;
  const std::int64_t first = first_span(plan, sequence);
  const auto state_at = [&](std::int64_t span) {
    return state_in(state_of_span(plan.shape, states, first + span, head), plan.shape, columns);
  };
  // The first slot is a copy of the initial state, so that the last span may overwrite the caller's.
  State<Real> previous = state_at(0);
  load_state(problem.initial_state.C, problem.initial_state.n, sequence.index, head, columns, previous);
  // Each state grows in the place where it will be read, its first tile from the one before it.
  for (std::int64_t begin = 0, span = 1; begin + plan.span < sequence.length; begin += plan.span, ++span) {
    State<Real> state = state_at(span);
    for (std::int64_t token = begin; token < begin + plan.span;) {
      const Tile tile{sequence, head, token, tile_end(plan, token, sequence.length)};
      advance(load_keys(problem, tile, buffers, columns), vectors.at(problem, sequence, head, token), previous, state);
      previous = state;
      token = tile.end;
    }
  }
}

template <class Real>
State<Real> state_at_span(const Problem& problem, const Span& span, std::int64_t head, Real* states) {
  const MlstmShape& shape = problem.plan.shape;
  State<Real> state = state_in(state_of_span(shape, states, span.number, head), shape, all_columns(shape));
  state.zero = span.begin == 0 && !problem.has_initial_state();
  return state;
}

#define TFLA_INSTANTIATE(Real)                                                                                        \
  template void copy_state(const State<Real>&, State<Real>&);                                                         \
  template void load_state(const TensorView&, const TensorView&, std::int64_t, std::int64_t, Columns, State<Real>&);  \
  template void store_state(const State<Real>&, const MutableTensorView&, const MutableTensorView&, std::int64_t,     \
                            std::int64_t);                                                                            \
  template void advance_matrix(Real, const Matrix<const Real>&, const Matrix<const Real>&, const State<Real>&,        \
                               const State<Real>&, const State<Real>&);                                               \
  template void advance_vector(Real, const Matrix<const Real>&, const Real*, const State<Real>&, const State<Real>&); \
  template struct StateBuffers<Real>;                                                                                 \
  template TileKeys<Real> load_keys(const Problem&, const Tile&, const StateBuffers<Real>&, Columns);                 \
  template TileKeys<Real> load_values(const Problem&, const Tile&, const StateBuffers<Real>&, Columns);               \
  template void advance(const TileKeys<Real>&, const GateVectors<Real>&, const State<Real>&, State<Real>&,            \
                        const State<Real>&);                                                                          \
  template void states_at_spans(const Problem&, const GateVectors<Real>&, const Sequence&, std::int64_t, Columns,     \
                                const StateBuffers<Real>&, Real*);                                                    \
  template State<Real> state_at_span(const Problem&, const Span&, std::int64_t, Real*)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
