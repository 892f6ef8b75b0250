// Stage `states`: the recurrence over tiles, C = gbar C + (abar K)^T V and n = gbar n + sum abar k, forward in time,
// and its reverse-time twin for dC, dn.
#pragma once

#include "cpu/tile.h"
#include "plan/cpu_sizes.h"

namespace tfla::cpu {

// The columns of the state that a thread works on: a panel, or all of them.
struct Columns {
  std::int64_t first = 0;
  std::int64_t width = 0;
};
[[nodiscard]] inline Columns all_columns(const MlstmShape& shape) { return {0, shape.dhv}; }
[[nodiscard]] inline Columns panel_columns(const MlstmShape& shape, std::int64_t panel) {
  return {panel * state_panel, std::min(state_panel, shape.dhv - panel * state_panel)};
}

// Columns of C, and n, of one head; or their gradients. A null n is not this thread's to carry. `zero`: nothing has
// been added yet and the memory is not initialised; products with it are skipped.
template <class Real>
struct State {
  Matrix<Real> C;     // [dqk,width]
  Real* n = nullptr;  // [dqk]
  bool zero = true;
};

// The part of a whole state in `memory` that a thread with these columns sees: n goes with the first column.
template <class Real>
[[nodiscard]] State<Real> state_in(Real* memory, const MlstmShape& shape, Columns columns) {
  const Matrix<Real> C = spread(memory, shape.dqk, shape.dhv);
  return {C.columns(columns.first, columns.width), columns.first == 0 ? memory + shape.dqk * C.stride : nullptr, true};
}

template <class Real>
void copy_state(const State<Real>& from, State<Real>& to);

// From and to the caller's tensors. Either view may be left out: what is missing is zero, or not written.
template <class Real>
void load_state(const TensorView& C, const TensorView& n, std::int64_t sequence, std::int64_t head, Columns columns,
                State<Real>& state);
template <class Real>
void store_state(const State<Real>& state, const MutableTensorView& C, const MutableTensorView& n,
                 std::int64_t sequence, std::int64_t head);

// C = decay C + X^T Y; X holds the weighted keys (or queries), Y the values (or output gradients). `from` may be `to`.
// Where `stored` has memory it gets a copy, for which the caches need not make room.
template <class Real>
void advance_matrix(Real decay, const Matrix<const Real>& X, const Matrix<const Real>& Y, const State<Real>& from,
                    const State<Real>& to, const State<Real>& stored = {});
// n = decay n + sum_t w_t x_t (null weights: 1)
template <class Real>
void advance_vector(Real decay, const Matrix<const Real>& X, const Real* weights, const State<Real>& from,
                    const State<Real>& to);

// Work space of a thread that moves a state over a tile.
template <class Real>
struct StateBuffers {
  Real* k = nullptr;   // [tile,dqk] converted keys
  Real* v = nullptr;   // [tile,dhv] converted values
  Real* kb = nullptr;  // [tile,dqk] abar K

  StateBuffers() = default;
  StateBuffers(Arena& arena, const Plan& plan);
};

// What a tile adds to a state.
template <class Real>
struct TileKeys {
  Matrix<const Real> K;
  Matrix<const Real> V;
  Matrix<Real> Kb;  // work space for abar K
};
template <class Real>
[[nodiscard]] TileKeys<Real> load_keys(const Problem& problem, const Tile& tile, const StateBuffers<Real>& buffers,
                                       Columns columns);

// The same where the buffers have K of these tokens, from a head that has the same keys.
template <class Real>
[[nodiscard]] TileKeys<Real> load_values(const Problem& problem, const Tile& tile, const StateBuffers<Real>& buffers,
                                         Columns columns);

// The state at the end of a tile from the one at its beginning, which may be the same memory, and a copy where `stored`
// has memory. `gates` are the tile's.
template <class Real>
void advance(const TileKeys<Real>& keys, const GateVectors<Real>& gates, const State<Real>& from, State<Real>& to,
             const State<Real>& stored = {});

// The states at the beginning of every span, for some columns of one head: what makes spans independent.
// `states` holds one state per span number and head.
template <class Real>
void states_at_spans(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence,
                     std::int64_t head, Columns columns, const StateBuffers<Real>& buffers, Real* states);

// Where the state of a span and head lies among `states`.
template <class Real>
[[nodiscard]] Real* state_of_span(const MlstmShape& shape, Real* states, std::int64_t number, std::int64_t head) {
  return states + (number * shape.heads + head) * state_size(shape);
}

// The state at the beginning of a span, where states_at_spans left it.
template <class Real>
[[nodiscard]] State<Real> state_at_span(const Problem& problem, const Span& span, std::int64_t head, Real* states);

}  // namespace tfla::cpu
