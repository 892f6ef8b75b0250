#include "cpu/delta/backward.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/delta_gates.h"
#include "cpu/gate_tensor.h"
#include "cpu/kernels/simd.h"
#include "cpu/threads.h"

namespace tfla::cpu::delta {

namespace {

[[nodiscard]] std::int64_t chunks_of(const DeltaPlan& plan, std::int64_t length) {
  return (length + plan.chunk - 1) / plan.chunk;
}
[[nodiscard]] std::int64_t state_size(const DeltaPlan& plan) { return spread_size(plan.shape.dqk, plan.shape.dhv); }

template <class Real>
Matrix<Real> state_matrix(const DeltaPlan& plan, Real* states, std::int64_t index) {
  return spread(states + index * state_size(plan), plan.shape.dqk, plan.shape.dhv);
}

template <class Real>
void copy_state(const State<Real>& from, State<Real>& to) {
  to.zero = from.zero;
  for (std::int64_t row = 0; !from.zero && row < from.C.rows; ++row)
    std::copy_n(from.C.row(row), from.C.cols, to.C.row(row));
}

// One value head of a sequence, on one thread.
template <class Real>
class HeadGradients {
 public:
  using Worker = typename BackwardScratch<Real>::Worker;

  HeadGradients(const Problem& problem, const BackwardTensors& tensors, const Sequence& sequence, std::int64_t head,
                Worker& worker)
      : problem_(problem), tensors_(tensors), sequence_(sequence), head_(head), worker_(worker) {}

  void run() {
    const DeltaPlan& plan = problem_.plan;
    const Columns columns{0, plan.shape.dhv};
    const std::int64_t chunks = chunks_of(plan, sequence_.length);
    make_chunk_states(chunks);
    dC_ = {.C = state_matrix(plan, worker_.dC, 0)};
    load_state(tensors_.dlast_state, sequence_.index, head_, columns, dC_);
    for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) chunk_gradients(chunk);
    store_state(dC_, tensors_.dinitial_state, sequence_.index, head_, columns);
  }

  // Sums over the sequence.
  double dA_log = 0;
  double ddt_bias = 0;

 private:
  [[nodiscard]] bool starts_from_nothing() const { return !problem_.initial_state.given(); }

  // Residuals and w of a tile from the state at its beginning.
  void tile_residuals(const TileKeys<Real>& keys, const Tile& tile, const State<Real>& state, Real* r) const {
    const std::int64_t dhv = problem_.plan.shape.dhv;
    (void)load_tile<Real>(problem_.v, tile, head_, r, 0, dhv);
    residuals(keys, state, spread(r, tile.size(), dhv), spread(worker_.w, tile.size(), dhv));
  }

  // dC has not begun yet, so the state inside of a chunk may take its memory.
  void make_chunk_states(std::int64_t chunks) const {
    const DeltaPlan& plan = problem_.plan;
    if (chunks == 0) return;
    State<Real> state{.C = state_matrix(plan, worker_.chunk_states, 0)};
    load_state(problem_.initial_state, sequence_.index, head_, {0, plan.shape.dhv}, state);
    for (std::int64_t token = 0; token < (chunks - 1) * plan.chunk;) {
      const Tile tile{sequence_, head_, token, problem_.tile_end(token, sequence_.length)};
      const TileKeys<Real> keys = load_keys(problem_, tile, worker_.tile);
      tile_residuals(keys, tile, state, worker_.residuals);
      const bool ends_chunk = tile.end % plan.chunk == 0;
      State<Real> next{.C = ends_chunk ? state_matrix(plan, worker_.chunk_states, tile.end / plan.chunk)
                                       : state_matrix(plan, worker_.dC, 0)};
      advance<Real>(keys, spread(worker_.w, tile.size(), plan.shape.dhv), state, next);
      state = next;
      token = tile.end;
    }
  }

  [[nodiscard]] Real* residuals_at(std::int64_t token_of_chunk) const {
    return worker_.residuals + spread_size(token_of_chunk, problem_.plan.shape.dhv);
  }
  [[nodiscard]] State<Real> tile_state(std::int64_t begin) const {
    const DeltaPlan& plan = problem_.plan;
    return {.C = state_matrix(plan, worker_.tile_states, begin % plan.chunk / plan.tile),
            .zero = begin == 0 && starts_from_nothing()};
  }

  void chunk_gradients(std::int64_t chunk) {
    const DeltaPlan& plan = problem_.plan;
    const std::int64_t first = chunk * plan.chunk, end = std::min(first + plan.chunk, sequence_.length);
    const std::int64_t tiles = (end - first + plan.tile - 1) / plan.tile;
    State<Real> state = tile_state(first);
    copy_state<Real>({.C = state_matrix(plan, worker_.chunk_states, chunk), .zero = state.zero}, state);
    for (std::int64_t token = first; token < end;) {
      const Tile tile{sequence_, head_, token, problem_.tile_end(token, sequence_.length)};
      const TileKeys<Real> keys = load_keys(problem_, tile, worker_.tile);
      tile_residuals(keys, tile, state, residuals_at(token - first));
      State<Real> next{.C = state_matrix(plan, worker_.tile_states, (tile.end - first + plan.tile - 1) / plan.tile)};
      advance<Real>(keys, spread(worker_.w, tile.size(), plan.shape.dhv), state, next);
      state = next;
      token = tile.end;
    }
    for (std::int64_t tile = tiles - 1; tile >= 0; --tile) {
      const std::int64_t begin = first + tile * plan.tile;
      tile_gradients({sequence_, head_, begin, std::min(begin + plan.tile, end)}, tile_state(begin),
                     state_matrix(plan, worker_.tile_states, tile + 1), residuals_at(begin - first));
    }
  }

  // C: at the tile's beginning, C_end: at its end.
  void tile_gradients(const Tile& tile, const State<Real>& C, const Matrix<Real>& C_end, Real* residual) {
    const DeltaPlan& plan = problem_.plan;
    const std::int64_t count = tile.size(), dqk = plan.shape.dqk, dhv = plan.shape.dhv;
    const auto scale = static_cast<Real>(problem_.scale());
    const TileKeys<Real> keys = load_keys(problem_, tile, worker_.tile);
    const TileGates<Real>& gates = *keys.gates;
    const Matrix<Real> Q = load_queries(problem_, tile, worker_.tile);
    const Matrix<Real> P = spread(worker_.tile.P, count, count), E = spread(worker_.E, count, count);
    const Matrix<Real> r = spread(residual, count, dhv);
    const Matrix<Real> w = scaled_rows<Real>(1, gates.beta, r, spread(worker_.w, count, dhv));
    const Matrix<const Real> dH = load_tile<Real>(tensors_.dh, tile, head_, worker_.dh, 0, dhv);
    const Matrix<Real> dX = spread(worker_.dX, count, dhv), dV = spread(worker_.dV, count, dhv);
    const Matrix<Real> rows = spread(worker_.scaled, count, dhv);
    const Matrix<Real> dQ = spread(worker_.dq, count, dqk);
    const Matrix<Real> dKr = spread(worker_.dk_read, count, dqk), dKw = spread(worker_.dk_written, count, dqk);

    gated_scores(scale, Matrix<const Real>(Q), keys, P);
    multiply(Product<Real>{.out = dX, .a = P.t(), .b = dH, .a_part = Part::upper});
    if (!dC_.zero) product(dX, scaled_rows<Real>(1, gates.abar, keys.K, keys.scaled), dC_.C, 1);
    residual_gradients(keys, dX, dV);
    store_tile<Real>(dV, nullptr, tensors_.dv, tile, head_);

    // P becomes dS.
    squared(scale, dH, w, keys.D, 1, P);
    squared(Real{-1}, Matrix<const Real>(dV), w, keys.D, 0, E);
    multiply(Product<Real>{.out = dQ, .a = P, .b = keys.K, .a_part = Part::lower});
    multiply(Product<Real>{.out = dKr, .a = E, .b = keys.K, .a_part = Part::lower});
    multiply(Product<Real>{.out = dKw, .a = P.t(), .b = Q, .a_part = Part::upper});
    multiply(Product<Real>{.out = dKw, .a = E.t(), .b = keys.K, .beta = 1, .added = dKw, .a_part = Part::upper});
    if (!C.zero) {
      product(dQ, scaled_rows<Real>(scale, gates.qbar, dH, rows), C.C.t(), 1);
      product(dKr, scaled_rows<Real>(-1, gates.qbar, dV, rows), C.C.t(), 1);
    }
    if (!dC_.zero) product(dKw, scaled_rows<Real>(1, gates.abar, w, rows), dC_.C.t(), 1);

    gate_gradients(tile, Q, keys, r, C_end);
    advance_gradient(scale, Q, keys, dH, dV);
    for (std::int64_t t = 0; t < count; ++t) simd::add(Real{1}, dKw.row(t), dKr.row(t), dqk);
    collect(tile, tensors_.dq, Q, worker_.tile.q_norm, dQ, worker_.dq_sum);
    collect(tile, tensors_.dk, keys.K, worker_.tile.k_norm, dKr, worker_.dk_sum);
  }

  // out_tj = scale D_tj (x w^T)_tj for j < t + seen; the rest of `out` is zero.
  static void squared(Real scale, const Matrix<const Real>& x, const Matrix<Real>& w, const Matrix<Real>& D,
                      std::int64_t seen, const Matrix<Real>& out) {
    multiply(Product<Real>{.out = out, .a = x, .b = w.t(), .out_part = Part::lower});
    for (std::int64_t t = 0; t < out.rows; ++t) {
      Real* row = out.row(t);
      simd::multiply(D.row(t), row, t + seen);
      simd::scale(scale, row, row, t + seen);
      std::fill(row + t + seen, row + out.cols, Real{0});
    }
  }

  void gate_gradients(const Tile& tile, const Matrix<Real>& Q, const TileKeys<Real>& keys, const Matrix<Real>& r,
                      const Matrix<Real>& C_end) {
    const std::int64_t count = tile.size(), dqk = problem_.plan.shape.dqk, dhv = problem_.plan.shape.dhv;
    const auto row = [&](Real* memory, std::int64_t t, std::int64_t cols) { return memory + spread_size(t, cols); };
    for (std::int64_t t = 0; t < count; ++t) {
      const double dbeta = simd::dot(row(worker_.dX, t, dhv), r.row(t), dhv);
      const std::int64_t at = gate_offset(problem_.beta, sequence_, tile.begin + t, head_);
      const double slope = write_slope(problem_.plan.options.write, read_gate(problem_.beta, at));
      write_gate(tensors_.dbeta, gate_offset(tensors_.dbeta, sequence_, tile.begin + t, head_), dbeta * slope);
    }
    if (!problem_.g.given()) return;
    double sum = 0;
    for (std::int64_t k = 0; !dC_.zero && k < dqk; ++k) sum += simd::dot(C_end.row(k), dC_.C.row(k), dhv);
    for (std::int64_t t = count - 1; t >= 0; --t) {
      sum += simd::dot(Q.row(t), row(worker_.dq, t, dqk), dqk) +
             simd::dot(keys.K.row(t), row(worker_.dk_read, t, dqk), dqk) -
             simd::dot(keys.K.row(t), row(worker_.dk_written, t, dqk), dqk);
      // Nothing passes a reset, and what is left of the sum there is rounding.
      store_decay_gradient(tile.begin + t, is_reset(keys.gates->log_decay[t]) ? 0.0 : sum);
    }
  }

  void store_decay_gradient(std::int64_t token, double gradient) {
    const std::int64_t at = gate_offset(tensors_.dg, sequence_, token, head_);
    if (!problem_.A_log.given()) {
      write_gate(tensors_.dg, at, gradient);
      return;
    }
    const auto of_head = [&](const TensorView& view) {
      return view.given() ? read_gate(view, head_ * view.strides[0]) : 0.0;
    };
    const double x =
        read_gate(problem_.g, gate_offset(problem_.g, sequence_, token, head_)) + of_head(problem_.dt_bias);
    const double rate = std::exp(of_head(problem_.A_log));
    const double dx = -rate * sigmoid(x) * gradient;
    write_gate(tensors_.dg, at, dx);
    ddt_bias += dx;
    dA_log -= rate * softplus(x) * gradient;
  }

  void advance_gradient(Real scale, const Matrix<Real>& Q, const TileKeys<Real>& keys, const Matrix<const Real>& dH,
                        const Matrix<Real>& dV) {
    const TileGates<Real>& gates = *keys.gates;
    multiply(Product<Real>{.out = dC_.C,
                           .a = scaled_rows<Real>(scale, gates.qbar, Q, keys.scaled).t(),
                           .b = dH,
                           .beta = dC_.zero ? Real{0} : gates.gbar,
                           .added = dC_.zero ? Matrix<Real>{} : dC_.C});
    product(dC_.C, scaled_rows<Real>(-1, gates.qbar, keys.K, keys.scaled).t(), dV, 1);
    dC_.zero = false;
  }

  // Through the norm, into the result; of a group, when its last head has been added.
  void collect(const Tile& tile, const MutableTensorView& to, const Matrix<Real>& x, const Real* norms,
               const Matrix<Real>& gradient, Real* sums) const {
    const std::int64_t dqk = x.cols, group = problem_.group(), of_group = head_ % group;
    for (std::int64_t t = 0; t < x.rows; ++t) {
      Real* row = gradient.row(t);
      if (group > 1) {
        Real* sum = sums + (tile.begin + t) * dqk;
        if (of_group > 0) simd::add(Real{1}, sum, row, dqk);
        std::copy_n(row, dqk, sum);
      }
      if (!problem_.plan.options.normalize_qk || of_group < group - 1) continue;
      simd::add(static_cast<Real>(-simd::dot(x.row(t), row, dqk)), x.row(t), row, dqk);
      simd::scale(norms[t], row, row, dqk);
    }
    if (of_group == group - 1) store_tile<Real>(gradient, nullptr, to, tile, head_ / group);
  }

  const Problem& problem_;
  const BackwardTensors& tensors_;
  const Sequence& sequence_;
  std::int64_t head_;
  Worker& worker_;
  State<Real> dC_;
};

// Sums over sequences, in their order.
void store_sums(const double* sums, const DeltaShape& shape, const MutableTensorView& to) {
  for (std::int64_t head = 0; to.given() && head < shape.heads; ++head) {
    double sum = 0;
    for (std::int64_t s = 0; s < shape.sequences; ++s) sum += sums[s * shape.heads + head];
    write_gate(to, head * to.strides[0], sum);
  }
}

}  // namespace

template <class Real>
BackwardScratch<Real>::Worker::Worker(Arena& arena, const DeltaPlan& plan) : tile(arena, plan) {
  const DeltaShape& shape = plan.shape;
  const std::int64_t tiles = (plan.chunk + plan.tile - 1) / plan.tile;
  residuals = arena.take<Real>(spread_size(plan.chunk, shape.dhv));
  for (Real** rows : {&w, &dh, &dX, &dV, &scaled}) *rows = arena.take<Real>(spread_size(plan.tile, shape.dhv));
  for (Real** rows : {&dq, &dk_read, &dk_written}) *rows = arena.take<Real>(spread_size(plan.tile, shape.dqk));
  E = arena.take<Real>(spread_size(plan.tile, plan.tile));
  dC = arena.take<Real>(state_size(plan));
  chunk_states = arena.take<Real>(std::max<std::int64_t>(chunks_of(plan, shape.longest), 1) * state_size(plan));
  tile_states = arena.take<Real>((tiles + 1) * state_size(plan));
  if (shape.heads == shape.qk_heads) return;
  for (Real** sum : {&dq_sum, &dk_sum}) *sum = arena.take<Real>(shape.longest * shape.dqk);
}

template <class Real>
BackwardScratch<Real>::BackwardScratch(Arena& arena, const DeltaPlan& plan) {
  for (double** sums : {&dA_log, &ddt_bias}) *sums = arena.take<double>(plan.shape.sequences * plan.shape.heads);
  workers = Workers<Worker>(arena, plan);
}

template <class Real>
void run_backward(const Problem& problem, const BackwardTensors& tensors, const BackwardScratch<Real>& scratch) {
  const DeltaPlan& plan = problem.plan;
  const DeltaShape& shape = plan.shape;
  parallel_for(shape.sequences * shape.qk_heads, plan.threads, [&](std::int64_t unit, int index) {
    const Sequence sequence = problem.sequence(unit / shape.qk_heads);
    auto worker = scratch.workers.at(plan, index);
    const std::int64_t first = unit % shape.qk_heads * problem.group();
    for (std::int64_t head = first; head < first + problem.group(); ++head) {
      HeadGradients<Real> gradients(problem, tensors, sequence, head, worker);
      gradients.run();
      scratch.dA_log[sequence.index * shape.heads + head] = gradients.dA_log;
      scratch.ddt_bias[sequence.index * shape.heads + head] = gradients.ddt_bias;
    }
  });
  store_sums(scratch.dA_log, shape, tensors.dA_log);
  store_sums(scratch.ddt_bias, shape, tensors.ddt_bias);
}

#define TFLA_INSTANTIATE(Real)           \
  template struct BackwardScratch<Real>; \
  template void run_backward(const Problem&, const BackwardTensors&, const BackwardScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu::delta
