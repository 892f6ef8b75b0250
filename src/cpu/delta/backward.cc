#include "cpu/delta/backward.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

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
  [[nodiscard]] Real scale() const { return static_cast<Real>(problem_.scale()); }

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
    State<Real> state = tile_state(first);
    copy_state<Real>({.C = state_matrix(plan, worker_.chunk_states, chunk), .zero = state.zero}, state);
    for (std::int64_t token = first; token < end;) {
      const Tile tile{sequence_, head_, token, problem_.tile_end(token, sequence_.length)};
      const TileKeys<Real> keys = load_keys(problem_, tile, worker_.tile);
      tile_residuals(keys, tile, state, residuals_at(token - first));
      token = tile.end;
      if (token == end) break;
      State<Real> next = tile_state(token);
      advance<Real>(keys, spread(worker_.w, tile.size(), plan.shape.dhv), state, next);
      state = next;
    }
    for (std::int64_t begin = first + (end - first - 1) / plan.tile * plan.tile; begin >= first; begin -= plan.tile) {
      tile_gradients({sequence_, head_, begin, std::min(begin + plan.tile, end)}, tile_state(begin),
                     residuals_at(begin - first));
    }
  }

  // C: at the tile's beginning.
  void tile_gradients(const Tile& tile, const State<Real>& C, Real* residual) {
    const std::int64_t count = tile.size(), dqk = problem_.plan.shape.dqk, dhv = problem_.plan.shape.dhv;
    const TileKeys<Real> keys = load_keys(problem_, tile, worker_.tile);
    const TileGates<Real>& gates = *keys.gates;
    const TileParts parts{.Q = load_queries(problem_, tile, worker_.tile),
                          .r = spread(residual, count, dhv),
                          .w = spread(worker_.w, count, dhv),
                          .dH = load_tile<Real>(tensors_.dh, tile, head_, worker_.dh, 0, dhv),
                          .dX = spread(worker_.dX, count, dhv),
                          .dV = spread(worker_.dV, count, dhv),
                          .dS = spread(worker_.dS, count, count),
                          .E = spread(worker_.E, count, count),
                          .dQ = spread(worker_.dq, count, dqk),
                          .dKr = spread(worker_.dk_read, count, dqk),
                          .dKw = spread(worker_.dk_written, count, dqk)};
    scaled_rows<Real>(1, gates.beta, parts.r, parts.w);
    value_gradients(keys, parts);
    store_tile<Real>(parts.dV, nullptr, tensors_.dv, tile, head_);
    score_gradients(keys, parts);
    key_gradients(keys, C, parts);
    write_gradients(tile, parts);
    if (problem_.g.given()) decay_gradients(tile, keys, C);
    advance_gradient(keys, parts);
    for (std::int64_t t = 0; t < count; ++t) simd::add(Real{1}, parts.dKw.row(t), parts.dKr.row(t), dqk);
    collect(tile, tensors_.dq, parts.Q, worker_.tile.q_norm, parts.dQ, worker_.dq_sum);
    collect(tile, tensors_.dk, keys.K, worker_.tile.k_norm, parts.dKr, worker_.dk_sum);
  }

  struct TileParts {
    Matrix<Real> Q, r, w;
    Matrix<const Real> dH;
    Matrix<Real> dX, dV, dS, E, dQ, dKr, dKw;
  };

  void value_gradients(const TileKeys<Real>& keys, const TileParts& parts) const {
    const Matrix<Real> P = spread(worker_.tile.P, parts.Q.rows, parts.Q.rows);
    gated_scores(scale(), Matrix<const Real>(parts.Q), keys, P);
    multiply(Product<Real>{.out = parts.dX, .a = P.t(), .b = parts.dH, .a_part = Part::upper});
    if (!dC_.zero) product(parts.dX, scaled_rows<Real>(1, keys.gates->abar, keys.K, keys.scaled), dC_.C, 1);
    residual_gradients(keys, parts.dX, parts.dV);
  }

  // dS and E, and for every token what decays from it on weigh of the scores: those of a later token, or of itself,
  // with an earlier one.
  void score_gradients(const TileKeys<Real>& keys, const TileParts& parts) const {
    const Matrix<Real> P = spread(worker_.tile.P, parts.Q.rows, parts.Q.rows);
    multiply(Product<Real>{.out = parts.dS, .a = parts.dH, .b = parts.w.t(), .out_part = Part::lower});
    multiply(Product<Real>{.out = parts.E, .a = parts.dV, .b = parts.w.t(), .out_part = Part::lower});
    const std::int64_t count = parts.Q.rows;
    std::fill_n(worker_.columns, count, 0.0);
    for (std::int64_t t = count - 1; problem_.g.given() && t >= 0; --t) {
      simd::add_products(parts.dS.row(t), P.row(t), worker_.columns, t);
      simd::add_products(parts.E.row(t), keys.minus_L.row(t), worker_.columns, t);
      worker_.across[t] = std::accumulate(worker_.columns, worker_.columns + t, 0.0);
    }
    for (std::int64_t t = 0; t < count; ++t) {
      gate_row(scale(), keys.D.row(t), parts.dS.row(t), t + 1, count);
      gate_row(Real{-1}, keys.D.row(t), parts.E.row(t), t, count);
    }
  }

  // The first `seen` numbers of a row times scale and their decays; the others are zero.
  static void gate_row(Real scale, const Real* decays, Real* row, std::int64_t seen, std::int64_t count) {
    simd::multiply(decays, row, seen);
    simd::scale(scale, row, row, seen);
    std::fill(row + seen, row + count, Real{0});
  }

  // dQ, dKr and dKw: what comes through the states first, since decays weigh that by itself.
  void key_gradients(const TileKeys<Real>& keys, const State<Real>& C, const TileParts& parts) const {
    const TileGates<Real>& gates = *keys.gates;
    const std::int64_t count = parts.Q.rows, dqk = parts.Q.cols;
    const Matrix<Real> rows = spread(worker_.scaled, count, parts.w.cols);
    for (double* sums : {worker_.read, worker_.written}) std::fill_n(sums, count, 0.0);
    if (!C.zero) {
      product(parts.dQ, scaled_rows<Real>(scale(), gates.qbar, parts.dH, rows), C.C.t(), 0);
      product(parts.dKr, scaled_rows<Real>(-1, gates.qbar, parts.dV, rows), C.C.t(), 0);
      for (std::int64_t t = 0; t < count; ++t)
        worker_.read[t] =
            simd::dot(parts.Q.row(t), parts.dQ.row(t), dqk) + simd::dot(keys.K.row(t), parts.dKr.row(t), dqk);
    }
    if (!dC_.zero) {
      product(parts.dKw, scaled_rows<Real>(1, gates.abar, parts.w, rows), dC_.C.t(), 0);
      for (std::int64_t t = 0; t < count; ++t) worker_.written[t] = simd::dot(keys.K.row(t), parts.dKw.row(t), dqk);
    }
    const auto add = [](const Matrix<Real>& to, const Matrix<Real>& a, const Matrix<Real>& b, Part part, bool first) {
      multiply(
          Product<Real>{.out = to, .a = a, .b = b, .beta = first ? Real{0} : Real{1}, .added = to, .a_part = part});
    };
    add(parts.dQ, parts.dS, keys.K, Part::lower, C.zero);
    add(parts.dKr, parts.E, keys.K, Part::lower, C.zero);
    add(parts.dKw, parts.dS.t(), parts.Q, Part::upper, dC_.zero);
    add(parts.dKw, parts.E.t(), keys.K, Part::upper, false);
  }

  void write_gradients(const Tile& tile, const TileParts& parts) const {
    for (std::int64_t t = 0; t < tile.size(); ++t) {
      const double dbeta = simd::dot(parts.dX.row(t), parts.r.row(t), parts.r.cols);
      const std::int64_t at = gate_offset(problem_.beta, sequence_, tile.begin + t, head_);
      const double slope = write_slope(problem_.plan.options.write, read_gate(problem_.beta, at));
      write_gate(tensors_.dbeta, gate_offset(tensors_.dbeta, sequence_, tile.begin + t, head_), dbeta * slope);
    }
  }

  // Of a token: all that is read from it on of what was written before it.
  void decay_gradients(const Tile& tile, const TileKeys<Real>& keys, const State<Real>& C) {
    const std::int64_t count = tile.size(), dqk = problem_.plan.shape.dqk, dhv = problem_.plan.shape.dhv;
    double kept = 0;  // from the tile's beginning to its end
    for (std::int64_t k = 0; !C.zero && !dC_.zero && k < dqk; ++k) kept += simd::dot(C.C.row(k), dC_.C.row(k), dhv);
    kept *= static_cast<double>(keys.gates->gbar);
    double read = 0;
    for (std::int64_t t = count - 1; t >= 0; --t) {
      read += worker_.read[t];
      const double written = std::accumulate(worker_.written, worker_.written + t, 0.0);
      // Nothing passes a reset, and gates may be infinite there.
      if (is_reset(keys.gates->log_decay[t])) {
        write_gate(tensors_.dg, gate_offset(tensors_.dg, sequence_, tile.begin + t, head_), 0);
      } else {
        store_decay_gradient(tile.begin + t, kept + read + written + worker_.across[t]);
      }
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

  void advance_gradient(const TileKeys<Real>& keys, const TileParts& parts) {
    const TileGates<Real>& gates = *keys.gates;
    multiply(Product<Real>{.out = dC_.C,
                           .a = scaled_rows<Real>(scale(), gates.qbar, parts.Q, keys.scaled).t(),
                           .b = parts.dH,
                           .beta = dC_.zero ? Real{0} : gates.gbar,
                           .added = dC_.zero ? Matrix<Real>{} : dC_.C});
    product(dC_.C, scaled_rows<Real>(-1, gates.qbar, keys.K, keys.scaled).t(), parts.dV, 1);
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
  for (Real** square : {&dS, &E}) *square = arena.take<Real>(spread_size(plan.tile, plan.tile));
  for (double** sums : {&columns, &across, &read, &written}) *sums = arena.take<double>(plan.tile);
  dC = arena.take<Real>(state_size(plan));
  chunk_states = arena.take<Real>(std::max<std::int64_t>(chunks_of(plan, shape.longest), 1) * state_size(plan));
  tile_states = arena.take<Real>(tiles * state_size(plan));
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
